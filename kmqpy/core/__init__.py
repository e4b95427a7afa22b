"""Tools for every package of kmqpy: durations, settings, clock, back-off, logs. They know no storage."""
