"""`python -m tracker`: the same as `kmq tracker`."""

from tracker.command import tracker

if __name__ == "__main__":
    tracker()
