"""Tests of near ties: only the reference says what is one, and an answer that lacks its end is none."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from tests.chaos.comparing import near_ties
from tests.chaos.oracle import History
from tests.end_to_end.client import EOS

FIRST = {"text": "abc", "tokens": [10, 11, 12], "finish": "length"}


def history(*answers: Mapping[str, object]) -> History:
    events: list[dict[str, object]] = []
    for id, answer in enumerate(answers):
        events.append({"is": "call", "key": "load", "method": "POST", "path": "/v1/completions", "question": "q"})
        events += [{"is": "head", "status": 200}, {"is": "piece", **answer}]
        events.append({"is": "end", "how": "done" if "finish" in answer else "broken"})
        events[-4:] = [{"at": 0.0, "id": id, **event} for event in events[-4:]]
    return History(map(json.dumps, events))


@pytest.mark.parametrize(
    ("other", "is_tie"),
    [
        ({"text": "abx", "tokens": [10, 11, 99], "finish": "length"}, True),
        ({"text": "ax", "tokens": [10, 99, EOS], "finish": "stop"}, True),
        ({"text": "ax", "tokens": [10, 99]}, True),  # it broke off
        ({"text": "ax", "tokens": [10, 99], "finish": "stop"}, False),  # too early
        ({"text": "ab", "tokens": [10, 11], "finish": "length"}, False),  # a token is lost
        ({"text": "abd", "tokens": [10, 11, 12], "finish": "length"}, False),  # the text is not that of the tokens
    ],
)
def test_other_tokens_may_be_a_near_tie(other: dict[str, object], is_tie: bool) -> None:
    told = history(FIRST, other)
    assert [tie.text for tie in near_ties(told, {"q": [5]}, lambda *_: True)] == [other["text"]] * is_tie
    assert list(near_ties(told, {"q": [5]}, lambda *_: False)) == []


def test_the_same_answer_and_its_beginning_are_none() -> None:
    assert list(near_ties(history(FIRST, FIRST, {"text": "a", "tokens": [10]}), {}, lambda *_: True)) == []
