"""Tells clients which gateways there are."""
