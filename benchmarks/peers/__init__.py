"""The peers that are measured side by side: each runs in a process of its own, and prints figures as JSON.

    python -m benchmarks.peers <peer> <work> '<options as JSON>'

A work is a function of the peer's module. The works that all clients do in the same way are in `works.py`.
"""
