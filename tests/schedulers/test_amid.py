"""Prompts of chats for a pause: what is looked at, as each event of a worker asks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from alignedserve.core import ServiceClass
from alignedserve.protocol.messages import Cancel
from alignedserve.schedulers.aligned import _AT_A_TIME
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.waiting_prompts import PromiseLine, Ranked, WaitingPrompts
from tests.decode_worker.test_pausing import SLO, Bench, chat, document, names


def test_documents_that_wait_are_not_looked_at_for_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 documents and a chat without room made each event take 7 ms."""
    bench, seen = Bench(), list[WorkerRequest]()
    for number in range(20):
        bench.comes(document(f"d{number}", 380))
    later = PromiseLine.later

    def noted(self: PromiseLine, now: float, most_s: float, is_rt: bool) -> Iterator[Ranked]:
        for ranked in later(self, now, most_s, is_rt):
            seen.append(ranked[1])
            yield ranked

    monkeypatch.setattr(PromiseLine, "later", noted)
    bench.comes(chat("a", 300))  # which finds too little memory
    assert not bench.amid
    assert [running.request.service for running in seen] == [ServiceClass.RT]


def test_few_of_many_chats_are_looked_at_for_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is memory for each, but no time."""
    bench, looks = Bench(), set[str]()
    bench.comes(chat("first", 4, replace(SLO, tbt_s=0.25)))
    bench.comes(document("d", 100))
    bench.ends(bench.steps[0])
    assert set(names(bench.steps[1])) == {"first", "d"}
    look = WaitingPrompts.look

    def noted(self: WaitingPrompts, running: WorkerRequest) -> None:
        looks.add(running.request.id)
        look(self, running)

    for number in range(100):
        bench.comes(chat(f"c{number}", 300))
    monkeypatch.setattr(WaitingPrompts, "look", noted)
    bench.hears(Cancel("unknown", 0))
    assert not bench.amid
    assert len(looks) == _AT_A_TIME
