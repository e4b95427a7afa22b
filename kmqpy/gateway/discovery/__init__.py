"""Tells clients, and other gateways, which gateways there are."""
