"""Metrics and tracing of the events in a message's life."""
