"""Health and metrics of a tracker over HTTP: /livez, /readyz, /metrics."""
