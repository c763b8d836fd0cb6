"""Note in a file which lines are open: the file outlives the job runner, and the next life finds there what may have
ended the last.

    a job runner dies while a line is open     the line's blame grows by 1, or by 2 if it was the only open line
    blame 2                                    the line runs alone
    blame 4                                    it has ended the job runner, and is failed

So a line that ends the job runner is failed after two deaths if nothing runs beside it, and else after three. A
deployment that ends, whatever ends it, blames no line. The file lies in the data folder, beside the store. It is
written without waiting for the disk: it has to outlive the process, not the machine.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from alignedserve.jobs.messages import Line
from alignedserve.jobs.state import ALONE_AT
from alignedserve.store.store import Holder

log = logging.getLogger("alignedserve.jobs")

NAME = "open-lines"


class _LinesNote(msgspec.Struct, frozen=True):
    holder: str
    life: int
    open: list[Line]
    blame: list[tuple[Line, int]]


class OpenLines:
    def __init__(self, folder: Path, holder: Holder) -> None:
        self._path, self._holder = folder / NAME, holder
        self._written = b""
        self._has_failed = False

    def read(self) -> dict[Line, int]:
        """Return the blame of each line that was open when a job runner died."""
        try:
            note = msgspec.json.decode(self._path.read_bytes().partition(b"\n")[0], type=_LinesNote)
        except (OSError, msgspec.DecodeError):
            return {}
        blame = dict(note.blame)
        if note.holder != self._holder.name or note.life == self._holder.life:
            return blame  # it ended with its whole deployment; or this life has lost its lease for a time
        for line in note.open:
            blame[line] = blame.get(line, 0) + (2 if len(note.open) == 1 else 1)
        if num_alone := sum(weight >= ALONE_AT for weight in blame.values()):
            log.warning("job runners died while lines were open: %d of them run alone, one by one", num_alone)
        return blame

    def write(self, open: Collection[Line], blame: Mapping[Line, int]) -> None:
        """Note the open lines, before they run."""
        note = _LinesNote(self._holder.name, self._holder.life, sorted(open), sorted(blame.items()))
        written = msgspec.json.encode(note) + b"\n"
        if written == self._written:
            return
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.pwrite(file, written, 0)
            finally:
                os.close(file)
            self._written = written
        except OSError as error:
            if not self._has_failed:
                log.warning("open lines are not noted, so one that ends the job runner is not found: %s", error)
            self._has_failed = True
