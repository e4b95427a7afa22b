"""The `kmq` command. Needs the extra `kmqpy[cli]`.

Exit codes: 0 done, 1 done in part (stderr says which), 2 bad use or a service away, 130 after Ctrl-C.
Errors are one line on stderr, `kmq: error: …`.
"""

from __future__ import annotations

import sys

from kmqpy.errors import MissingExtra

__all__ = ["main"]


def main() -> None:
    """Run `kmq` and exit."""
    try:
        import click  # noqa: F401
        import rich  # noqa: F401
    except ImportError:
        print(f"kmq: error: {MissingExtra('cli', 'kmq')}", file=sys.stderr)
        sys.exit(2)
    from kmqpy.cli.app import run

    sys.exit(run(sys.argv[1:]))
