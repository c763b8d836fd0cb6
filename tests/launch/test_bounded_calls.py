"""Tests that a call that does not return holds up its caller only so long, and only one thread."""

from __future__ import annotations

import threading
from concurrent.futures import TimeoutError as Late

import pytest

from alignedserve.launch.bounded import BoundedCalls
from alignedserve.launch.host import NoAnswer

LONG_S = 60.0


def fails() -> None:
    raise Late("its own")


def test_a_call_returns_or_raises_as_it_would_alone() -> None:
    calls = BoundedCalls("Ray", LONG_S)
    assert calls.within(lambda: 5) == 5
    with pytest.raises(Late, match="its own"):
        calls.within(fails)


def test_calls_fail_while_one_does_not_return_and_go_on_after_it() -> None:
    calls, goes_on, made = BoundedCalls("Ray", 0.05), threading.Event(), list[int]()
    with pytest.raises(NoAnswer, match=r"Ray has not answered for 0\.05 s"):
        calls.within(lambda: goes_on.wait(LONG_S))
    with pytest.raises(NoAnswer, match="Ray still does not answer"):
        calls.within(lambda: made.append(1))
    assert made == []
    goes_on.set()
    for thread in threading.enumerate():
        if thread.name == "bounded-call":
            thread.join(LONG_S)
    calls.within(lambda: made.append(2))
    assert made == [2]
