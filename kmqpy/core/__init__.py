"""Tools for every room: durations, settings, clock, back-off, logs. Knows no storage."""
