"""The `kmq` command. Needs the extra `kmqpy[cli]`.

Exit codes: 0 done, 1 done in part (stderr says which), 2 bad use or no answer of a service, 130 after Ctrl-C.
Errors are one line on stderr, `kmq: error: …`.
"""

from __future__ import annotations

import os
import sys

from kmqpy.errors import MissingExtra

__all__ = ["main"]

_STDERR = 2


def main() -> None:
    """Run `kmq` and exit."""
    _fill_closed_streams()
    try:
        import click  # noqa: F401
        import rich  # noqa: F401
    except ImportError:
        print(f"kmq: error: {MissingExtra('cli', 'kmq')}", file=sys.stderr)
        sys.exit(2)
    from kmqpy.cli.app import run

    sys.exit(run(sys.argv[1:]))


def _fill_closed_streams() -> None:
    """Open the null device in place of each standard stream that was closed (`<&-`).

    Otherwise a connection to Kafka would get the number of the stream, and kmq would print into that
    connection.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(opened, True)  # noqa: FBT003 - takes no names
    os.close(opened)
