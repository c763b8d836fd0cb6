"""The log of every process: its lines as text or as JSON, and an output that never fails and never waits."""

from __future__ import annotations

import io
import json
import logging
import os
import select
import stat
import sys
import threading
import traceback
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, TextIO

from alignedserve.config.choices import LogFormat, LogLevel
from alignedserve.config.sections import LogConfig

_log = logging.getLogger("alignedserve.logs")

BURST, LINES_A_SECOND = 500, 20  # of one kind from one process
_READER_S = 1.0  # that a reader may take which is only slow: the first time, not once something was lost


class _LosingFile(io.FileIO):
    """A file that drops what cannot be written, since its reader has gone or stands still, or its disk is full. It says
    how much that was with what it can write next."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, "w", closefd=False)
        self._num_lost, self._out = 0, _without_waiting(fd)
        self._room = select.poll()
        self._room.register(self._out, select.POLLOUT)

    def write(self, data: Any, /) -> int:
        with suppress(OSError):
            if self._room.poll(0 if self._num_lost else _READER_S * 1_000):
                if self._num_lost:
                    os.write(self._out, f"\nalignedserve: {self._num_lost:,} bytes of output were lost here\n".encode())
                    self._num_lost = 0
                return os.write(self._out, data)
        num_bytes = memoryview(data).nbytes
        self._num_lost += num_bytes
        return num_bytes


def _without_waiting(fd: int) -> int:
    """Open the pipe or terminal of `fd` again so that no write waits for its reader: other processes share the flags of
    `fd` itself. Return `fd` where that cannot be, as for a file or a socket."""
    with suppress(OSError):
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return fd


def never_fail_to_print() -> None:
    """Let standard output and standard error of this process lose what cannot be written, and raise nothing.

    No line is worth a deployment. What Python writes at its exit, tracebacks and the lines of libraries included.
    """
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:  # it was closed when the process began, so its number is free, and no socket should get it
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, "w"))
        elif _number(stream) == fd:  # or something else has taken its place, such as a test
            file = io.BufferedWriter(_LosingFile(fd))
            encoding, errors = stream.encoding, "backslashreplace"
            setattr(sys, name, io.TextIOWrapper(file, encoding, errors, line_buffering=True))


def _number(stream: TextIO) -> int | None:
    with suppress(OSError, ValueError):
        return stream.fileno()
    return None


class _CalmHandler(logging.StreamHandler):  # Python 3.10 takes no parameter
    """Leaves out lines of a kind that come too fast, and says in the next one how many these were.

    A kind is a place in the code and a text before its values are filled in, but for the caller and the status. A flood
    of refusals so fills no disk, and hides no answer to another key and no other fault. That is found out under the
    handler's lock, which filters of a handler are asked without: several threads write, and none may meet a count of
    another half changed."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._kinds: OrderedDict[tuple[object, ...], _Kind] = OrderedDict()  # the longest silent one first

    def emit(self, record: logging.LogRecord) -> None:
        fields, now = _fields(record), record.created
        name = record.pathname, record.lineno, str(record.msg), fields.get("caller"), fields.get("status")
        kind = self._kinds.pop(name, None) or _Kind(now)
        self._kinds[name] = kind
        if len(self._kinds) > _MOST_KINDS:
            self._kinds.popitem(last=False)
        kind.left = min(BURST, kind.left + max(0.0, now - kind.at) * LINES_A_SECOND)
        kind.at = now
        if kind.left < 1:
            kind.left_out += 1
            return
        kind.left -= 1
        if kind.left_out:
            record.fields = {**fields, "lines_like_it_left_out": kind.left_out}
            kind.left_out = 0
        super().emit(record)


@dataclass
class _Kind:
    at: float  # of its last line
    left: float = BURST
    left_out: int = 0


_MOST_KINDS = 1_000  # some lines are written with their values in them


def _frames(error: BaseException | None) -> str:
    """Return the traceback of an error and of what led to it, with types, files and lines.

    What an error says may quote a client, so only the system's words stay, and those of imports."""
    told, at, seen = list[str](), error, set[int]()
    while at is not None and len(told) < _MOST_CAUSES and id(at) not in seen:
        seen.add(id(at))
        said = str(at) if isinstance(at, ImportError) else ""
        if isinstance(at, OSError) and at.errno:
            said = os.strerror(at.errno)
        name = f"{type(at).__module__}.{type(at).__qualname__}".removeprefix("builtins.")
        told.append("".join([_HEAD, *traceback.format_tb(at.__traceback__), name, f": {said}" if said else ""]))
        members = getattr(at, "exceptions", ())  # of an ExceptionGroup
        told += [f"one of its group:\n{_frames(each)}" for each in members[:_MOST_CAUSES] if each is not error]
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return "\nled to:\n".join(reversed(told))


_HEAD, _MOST_CAUSES = "Traceback (most recent call last):\n", 10


def _is_without_quotes(record: logging.LogRecord) -> bool:
    """Let libraries say nothing of an error but where it was: asyncio quotes what a callback was given."""
    if record.exc_info and not record.name.startswith("alignedserve"):
        record.msg, record.args = f"{record.name} has met an error", None
    return True


def _ends(_: object, error: BaseException, __: object = None) -> None:
    _log.critical("what nobody has foreseen ends this process", exc_info=error)


def _ends_thread(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_type is not SystemExit:  # with it a thread ends as it was to
        _log.error("thread %s has failed", ended.thread and ended.thread.name, exc_info=ended.exc_value)


class _TextFormatter(logging.Formatter):
    def formatException(self, ei: Any) -> str:
        return _frames(ei[1])

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
            line["traceback"] = _frames(record.exc_info[1])
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
    """Send the log lines of this process, or those below a name, to standard error, in the configured format; those of
    the process with what libraries warn of."""
    handler = (logging.StreamHandler if config.level is LogLevel.DEBUG else _CalmHandler)(sys.stderr)
    if config.format is LogFormat.JSON:
        handler.setFormatter(_JsonFormatter(part))
    else:
        handler.setFormatter(_TextFormatter(f"%(asctime)s %(levelname)s {part}: %(message)s"))
    handler.addFilter(_is_without_quotes)
    if below == "alignedserve":
        logging.lastResort, sys.excepthook, threading.excepthook = handler, _ends, _ends_thread
    root = logging.getLogger(below)
    root.handlers[:] = [handler]
    root.setLevel(config.level.value.upper())
    root.propagate = False
