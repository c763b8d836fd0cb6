"""How the launcher shows a long start: its slowest part, as a bar on a terminal, or at times as a line of the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TextIO

from alignedserve.cli.terminal.progress import ProgressBar
from alignedserve.signs import Sign

log = logging.getLogger("alignedserve.launch")

_WIDTH = 20  # of the bar: it is shorter than lines of the log, which parts write over it
_LINE_S = 10.0  # between two lines of the log: a start that is shorter has none


class StartScreen:
    def __init__(self, file: TextIO, is_for_people: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """Show a bar if the file is a terminal and lines of the log are for people, or else write lines."""
        self._bar = ProgressBar("alignedserve:", file) if is_for_people and file.isatty() else None
        self._clock, self._is_drawn = clock, False
        self._next_at, self._line = clock() + _LINE_S, ""

    def show(self, sign: Sign | None) -> None:
        """Show what the slowest part does; None where no part is starting."""
        if sign is None:
            return self.clear()
        text = f"{sign.part} {sign.stage.value}"
        if self._bar is not None:
            self._is_drawn = True
            full = int(_WIDTH * sign.share)
            drawn = f" [{'#' * full}{'.' * (_WIDTH - full)}]" if sign.total else ""
            return self._bar.tell(f"{text}{drawn} {sign.amount}\r")  # the next line of a log begins where the bar does
        line = f"{text}: {sign.amount}" if sign.amount else text
        if self._clock() >= self._next_at and line != self._line:
            log.info("starting: %s", line)
            self._next_at, self._line = self._clock() + _LINE_S, line
        return None

    def clear(self) -> None:
        if self._bar is not None and self._is_drawn:
            self._bar.clear()
            self._is_drawn = False
