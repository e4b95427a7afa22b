"""Fetch sets of jars and print their paths: `python -m kmqpy.dev [--relock] [set ...]`."""

import argparse
import json
import sys

from kmqpy.dev.jars import LOCK, jar_set, relock
from kmqpy.errors import KmqError


def main() -> None:
    """Fetch the sets named on the command line, or all, and print the paths of their jars."""
    known = list(json.loads(LOCK.read_text()))
    parser = argparse.ArgumentParser(prog="python -m kmqpy.dev", description=__doc__)
    parser.add_argument("sets", nargs="*", metavar="set", help=f"{', '.join(known)}; default: all")
    parser.add_argument("--relock", action="store_true", help="resolve and pin the jars of the sets again")
    options = parser.parse_args()
    if unknown := set(options.sets) - set(known):
        parser.error(f"no such set in {LOCK.name}: {', '.join(sorted(unknown))}")
    try:
        if options.relock:
            relock(options.sets or known)
        for name in options.sets or known:
            for path in jar_set(name):
                sys.stdout.write(f"{path}\n")
    except KmqError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
