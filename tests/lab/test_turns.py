"""Tests of what benchmarks.turns asks servers for, with servers that only note it."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from alignedserve.lab.benchmarks import turns
from alignedserve.lab.benchmarks.common.serving import Answer
from alignedserve.lab.benchmarks.turns import Servers


class NotingServer:
    """Notes prompts, and finds as much of each as it was told to."""

    def __init__(self, num_cached: int) -> None:
        self.prompts: list[list[int]] = []
        self._num_cached = num_cached

    async def ask(self, _url: str, prompt: list[int], num_output: int, **_more: object) -> Answer:
        self.prompts.append(list(prompt))
        tokens = [9] * num_output
        return Answer(0.0, 200, num_output, self._num_cached, tokens, [1.0] * num_output)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "SETTLES_S", 0.0)
    monkeypatch.setattr(turns, "THINKS_S", 0.0)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> NotingServer:
    server = NotingServer(128)
    monkeypatch.setattr(turns, "ask", server.ask)
    return server


def test_servers_take_turns_and_each_begins_as_often() -> None:
    asked = []

    async def load(url: str) -> str:
        asked.append(url)
        return url

    outcomes = Servers("ours", "peer", 2).play(load, times=2)
    assert asked == ["ours", "peer", "peer", "ours"] * 2
    assert (outcomes.ours, outcomes.baseline) == (["ours"] * 4, ["peer"] * 4)
    assert Servers("ours", None, 2).play(load).baseline == []


def test_a_turn_has_the_whole_conversation_before_it(server: NotingServer) -> None:
    asyncio.run(turns.talk("", 3))
    assert [len(prompt) for prompt in server.prompts] == [192, 192 + 240, 192 + 480]
    for earlier, later in pairwise(server.prompts):
        assert later[: len(earlier) + turns.OUT] == earlier + [9] * turns.OUT
