"""Hostile input for everything that reads bytes or text from elsewhere.

`make fuzz ARGS="marker --seconds 60"` (python -m tests.fuzz) lets atheris look for new paths; in CI
hypothesis runs the same targets, see tests/unit/test_fuzz.py.
"""
