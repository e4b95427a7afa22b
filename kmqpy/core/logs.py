"""Formats logs as text or JSON lines, with the fields in `extra`; escapes text that a terminal shows."""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any

_BEYOND_VISIBLE_ASCII = re.compile(r"[^ -~]+")
"""Characters that may need an escape in JSON; printable_json() keeps those that are visible."""
_STANDARD_ATTRIBUTES = logging.makeLogRecord({}).__dict__.keys() | {"message", "asctime", "taskName"}
"""The attributes that a log record may have by itself; other attributes are fields from `extra`."""


def setup(level: str = "INFO", form: str = "text") -> None:
    """Send the logs of this process to stderr, as `text` or `json` (`form`)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    ours = logging.getLogger("kmqpy")  # kmq may have given it a handler, for errors of short commands
    ours.handlers.clear()
    ours.propagate = True


def printable(text: str) -> str:
    """`text` on one line: an escape replaces each character that is not visible.

    Other programs choose keys, names and reasons. Unescaped, these could control a terminal (escape codes, C1
    controls), add lines to a table or a log, or reverse the reading direction.
    """
    return text if text.isprintable() else "".join(map(_visible, text))


def printable_lines(text: str) -> str:
    """Like printable(), but keeps line ends: for text of several lines that kmqpy wrote."""
    return "\n".join(map(printable, text.split("\n")))


def printable_json(value: Any, **options: Any) -> str:
    """`value` as JSON with only visible characters; a parser of the JSON gets every original character."""
    text = json.dumps(value, ensure_ascii=False, **options)
    return text if text.isprintable() else _BEYOND_VISIBLE_ASCII.sub(_escaped_for_json, text)


def _visible(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]


def _escaped_for_json(found: re.Match[str]) -> str:
    return "".join(
        c if c.isprintable() else "\\u007f" if c == "\x7f" else json.dumps(c)[1:-1] for c in found[0]
    )


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """The fields that the caller of the logger passed as `extra`."""
    return {key: value for key, value in record.__dict__.items() if key not in _STANDARD_ATTRIBUTES}


class TextFormatter(logging.Formatter):
    """Formats a record as `time level logger: message key=value …`."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line; the lines of its traceback follow, if it has one."""
        shown = "".join(f" {key}={value}" for key, value in fields(record).items())
        line = f"{_time(record)} {record.levelname} {record.name}: {record.getMessage()}{shown}"
        if not record.exc_info:
            return printable(line)
        return f"{printable(line)}\n{printable_lines(self.formatException(record.exc_info))}"


class JsonFormatter(logging.Formatter):
    """Formats a record as one line, a JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON; a value of a type that JSON lacks becomes text."""
        content = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **fields(record),
        }
        if record.exc_info:
            content["traceback"] = self.formatException(record.exc_info)
        return printable_json(content, default=str)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
