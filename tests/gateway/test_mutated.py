"""Tests that the gateway answers whatever the grammar of its API draws with one mutation, and that faults are seen.

`make draws` sends other requests in each run, and `python -m tests.gateway.mutated` a million.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from alignedserve.gateway import app
from alignedserve.gateway.openai.errors import ApiError
from alignedserve.gateway.openapi import document
from alignedserve.text.text_model import TextModel
from tests.gateway.mutated import run
from tests.gateway.mutating import Call, Grammar

USUAL = 500


def test_every_request_is_answered_in_the_interface_s_form(text: TextModel, tmp_path: Path) -> None:
    told = run(text, tmp_path, seed=0, number=USUAL)
    assert not told.faults, str(told)
    assert told.statuses.total() == USUAL
    assert {200, 400, 404, 405} <= told.statuses.keys()


def test_every_route_and_every_mutation_is_drawn() -> None:
    grammar = Grammar()
    drawn = [grammar.draw(Random(seed)) for seed in range(6000)]
    paths = {path.partition("{")[0] for path in document(with_jobs=True)["paths"]}
    assert {path for path in paths if not any(call.path.startswith(path) for call in drawn)} == set()
    kinds = {call.mutation.rpartition(": ")[2].partition(" ")[0] for call in drawn}
    assert {"bytes", "header", "method", "path", "query", "cuts", "leaves", "junk", "left", "deep"} <= kinds
    assert len({call.body for call in drawn}) > len(drawn) / 2
    assert drawn[:50] == [Grammar().draw(Random(seed)) for seed in range(50)], "a seed draws the same again"


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: object) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("error", [ValueError("planted"), ApiError(500, "planted"), ApiError(400, "")])
def test_a_fault_of_the_gateway_is_seen(
    text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(app, "detokenize", raising(error))
    monkeypatch.setattr(Grammar, "draw", lambda *_: DETOKENIZE)
    told = run(text, tmp_path, seed=0, number=3)
    assert told.num_faults >= 3
    assert "planted" in str(told) or "an empty message" in told.faults


DETOKENIZE = Call("POST", "/detokenize", b'{"tokens": [5]}', ((b"content-type", b"application/json"),))
