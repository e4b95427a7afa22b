"""The markers format and what it means: codec, replay, messages in flight. Pure: no I/O, no clock."""
