"""Measures every part of kmqpy beside its peers, on the embedded cluster.

A *peer* is one of the things that a case compares, kmqpy included. A *turn* is one measurement of one peer.

    make bench                     everything, repeated; takes most of an hour
    make bench ARGS=--quick        smaller numbers, less than 3 minutes
    make bench ARGS="--only drain,latency"
    make bench-table               writes the committed results into README.md and docs/

Each measurement runs in fresh processes, except that of first_message. The peers of one case take turns (A B
C A B C), so that other load of the machine meets them all. No figure is ever asserted.
"""
