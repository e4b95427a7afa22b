"""Reports events of messages (sent, received, finished …) as metrics and traces."""
