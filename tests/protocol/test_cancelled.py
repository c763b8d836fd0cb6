"""Tests of what is remembered of cancelled attempts."""

from __future__ import annotations

from alignedserve.protocol.cancelled import MOST_REMEMBERED, CancelledAttempts


def test_earlier_attempts_are_cancelled_too_and_later_ones_are_not() -> None:
    cancelled = CancelledAttempts()
    assert ("a", 0) not in cancelled
    cancelled.add("a", 2)
    assert [number for number in range(5) if ("a", number) in cancelled] == [0, 1, 2]
    assert ("b", 0) not in cancelled


def test_a_late_cancel_of_an_earlier_attempt_takes_nothing_back() -> None:
    cancelled = CancelledAttempts()
    cancelled.add("a", 2)
    cancelled.add("a", 1)
    assert ("a", 2) in cancelled


def test_the_request_that_was_cancelled_longest_ago_is_forgotten() -> None:
    cancelled = CancelledAttempts()
    for number in range(MOST_REMEMBERED):
        cancelled.add(f"request-{number}", 0)
    cancelled.add("request-0", 0)  # once more: now it is the last
    cancelled.add("another", 0)
    assert ("request-0", 0) in cancelled
    assert ("another", 0) in cancelled
    assert ("request-1", 0) not in cancelled
    assert ("request-2", 0) in cancelled
