"""The redelivery tracker of kmqpy: `python -m tracker` or `kmq tracker`."""
