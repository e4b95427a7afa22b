"""What is measured side by side; each runs in a process of its own and says what it saw as JSON.

    python -m benchmarks.peers <peer> <work> '<options as JSON>'

All of them do the same work, written down once in `works.py`, over the four calls of `Peer`.
"""
