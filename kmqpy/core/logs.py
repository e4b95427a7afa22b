"""Structured logs: what a record's `extra` holds is shown as fields, as text or as JSON lines."""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any

_INVISIBLE_IN_JSON = re.compile(r"[^ -~]+")
_STANDARD = logging.makeLogRecord({}).__dict__.keys() | {"message", "asctime", "taskName"}


def setup(level: str = "INFO", form: str = "text") -> None:
    """Send the logs of this process to stderr; `form` is `text` or `json`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    ours = logging.getLogger("kmqpy")  # the command line shows errors of short commands its own way
    ours.handlers.clear()
    ours.propagate = True


def printable(text: str) -> str:
    """`text` on one line, with an escape for each character that is no visible one.

    Keys, names and reasons are written by others. As they are, they could steer a terminal (escape codes, C1
    controls), add lines to a table or a log, or turn the reading direction round.
    """
    return text if text.isprintable() else "".join(map(_visible, text))


def printable_lines(text: str) -> str:
    """Like printable(), for text of several lines that kmqpy wrote: the line ends stay."""
    return "\n".join(map(printable, text.split("\n")))


def printable_json(value: Any, **options: Any) -> str:
    """`value` as JSON that a terminal shows as it is; reading it gives back every character."""
    text = json.dumps(value, ensure_ascii=False, **options)
    return text if text.isprintable() else _INVISIBLE_IN_JSON.sub(_escaped_for_json, text)


def _visible(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]


def _escaped_for_json(found: re.Match[str]) -> str:
    return "".join(
        c if c.isprintable() else "\\u007f" if c == "\x7f" else json.dumps(c)[1:-1] for c in found[0]
    )


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """The fields that the caller passed as `extra`."""
    return {key: value for key, value in record.__dict__.items() if key not in _STANDARD}


class TextFormatter(logging.Formatter):
    """`time level logger: message key=value …`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and a traceback if there is one."""
        shown = "".join(f" {key}={value}" for key, value in fields(record).items())
        line = f"{_time(record)} {record.levelname} {record.name}: {record.getMessage()}{shown}"
        if not record.exc_info:
            return printable(line)
        return f"{printable(line)}\n{printable_lines(self.formatException(record.exc_info))}"


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON; values that JSON does not know as text."""
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
