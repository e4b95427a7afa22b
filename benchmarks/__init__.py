"""Every part of kmqpy measured beside its peers, on the embedded cluster.

    make bench                     everything, repeated; takes most of an hour
    make bench ARGS=--quick        smaller numbers, less than 3 minutes
    make bench ARGS="--only drain,latency"
    make bench-table               the committed results into README.md and docs/

Each measurement runs in fresh processes, and the peers of one case take turns (A B C A B C), so that
what else the machine does meets them all. No figure is ever asserted.
"""
