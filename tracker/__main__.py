"""`python -m tracker`: the same as `kmq tracker`."""

import sys

from kmqpy.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "tracker")
    main()
