"""What a tracker tells of itself: /livez, /readyz, /metrics."""
