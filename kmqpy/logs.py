"""Structured logs: what a record's `extra` holds is shown as fields, as text or as JSON lines."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

_STANDARD = logging.makeLogRecord({}).__dict__.keys() | {"message", "asctime", "taskName"}


def setup(level: str = "INFO", form: str = "text") -> None:
    """Send the logs of this process to stderr; `form` is `text` or `json`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    ours = logging.getLogger("kmqpy")  # the command line shows errors of short commands its own way
    ours.handlers.clear()
    ours.propagate = True


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """What was given as `extra`."""
    return {key: value for key, value in record.__dict__.items() if key not in _STANDARD}


class TextFormatter(logging.Formatter):
    """`time level logger: message key=value …`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and a traceback if there is one."""
        shown = "".join(f" {key}={value}" for key, value in fields(record).items())
        line = f"{_time(record)} {record.levelname} {record.name}: {record.getMessage()}{shown}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


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
        return json.dumps(content, default=str)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
