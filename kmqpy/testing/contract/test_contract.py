"""The tests that `pytest --kmq-storage=URL` runs."""

from kmqpy.testing.contract import *
