"""Copies of messages whose leases are over: which, and by which transaction."""
