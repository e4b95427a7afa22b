"""The largest 64-bit integer: the limit of offsets, times and durations in ms, and counts in settings."""

INT64_MAX = 2**63 - 1
