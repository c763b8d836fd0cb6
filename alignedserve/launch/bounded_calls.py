"""Calls with a limit, for a launcher that would keep nothing while one of them does not return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from typing import Any, TypeVar

CALL_S = 20.0  # for a call to Ray
Result = TypeVar("Result")


class NoAnswer(Exception):
    """A call has not returned in time, or one before it has not yet."""


class BoundedCalls:
    """Makes one call after the other, each in a thread of its own. A call that is late goes on there."""

    def __init__(self, whom: str, most_s: float = CALL_S) -> None:
        self._whom, self._most_s = whom, most_s
        self._late: Future[Any] | None = None

    def within(self, call: Callable[[], Result]) -> Result:
        """Return what the call returns; raise NoAnswer where it is late, and at once while an earlier one is."""
        if self._late is not None and not self._late.done():
            raise NoAnswer(f"{self._whom} still does not answer")
        answer: Future[Result] = Future()

        def run() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=run, name="bounded-call", daemon=True).start()
        try:
            return answer.result(self._most_s)
        except Late:
            if answer.done():  # just now, or the call itself has failed so
                return answer.result()
            self._late = answer
            raise NoAnswer(f"{self._whom} has not answered for {self._most_s:g} s") from None
