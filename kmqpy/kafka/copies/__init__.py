"""Builds, writes and checks copies: the records that redeliver, dead-letter or redrive a message."""
