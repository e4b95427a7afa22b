"""Reads the markers of owned partitions, and checks that the messages exist that the markers name."""
