"""Reads and writes markers, and computes from them which messages are in flight. Pure: no I/O, no clock."""
