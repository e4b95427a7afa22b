"""What every room needs: durations, settings, clock, back-off, logs. Knows no storage."""
