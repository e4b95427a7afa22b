"""Decides which copy a message gets whose lease is over, and makes it. Writes ticks, too."""
