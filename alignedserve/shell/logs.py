"""The format of log lines in every process: time, severity, part and message, as text or as JSON."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone
from typing import Any

from alignedserve.config.config import LogConfig, LogFormat


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line, *traceback = super().format(record).split("\n", 1)
        fields = " ".join(f"{name}={_shown(value)}" for name, value in _fields(record).items() if value is not None)
        return "\n".join([f"{line} {fields}".rstrip(), *traceback])


class _JsonFormatter(logging.Formatter):
    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        line = {"at": at, "level": record.levelname.lower(), "part": self._part, "message": record.getMessage()}
        line |= _fields(record)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the named fields of a line, which come as `extra={"fields": ...}`."""
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields


def _shown(value: Any) -> str:
    """Return a value as it stands in a line. Clients choose some values, such as a path: quotes keep a value from
    looking like another field or another line."""
    text = str(value)
    return text if text.isprintable() and not {" ", '"'} & set(text) else json.dumps(text)


def set_up(config: LogConfig, part: str, below: str = "alignedserve") -> None:
    """Send the log lines of this process, or those below a name, to standard error, in the configured format."""
    handler = logging.StreamHandler(sys.stderr)
    if config.format is LogFormat.JSON:
        handler.setFormatter(_JsonFormatter(part))
    else:
        handler.setFormatter(_TextFormatter(f"%(asctime)s %(levelname)s {part}: %(message)s"))
    root = logging.getLogger(below)
    root.handlers[:] = [handler]
    root.setLevel(config.level.value.upper())
    root.propagate = False
