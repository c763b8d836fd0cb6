"""Tests of what benchmarks.turns asks servers for, with servers that only note it."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from alignedserve.lab.benchmarks import turns
from alignedserve.lab.benchmarks.common.serving import Answer
from alignedserve.lab.benchmarks.turns import (
    FIRST_USES,
    HOT,
    HOT_SIZE,
    ONCE_SIZE,
    POOL_MB,
    SCANS,
    TOKEN_BYTES,
    USES,
    Servers,
)

POOL_TOKENS = (POOL_MB << 20) / TOKEN_BYTES


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
    server = NotingServer(HOT_SIZE // 2)
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


@pytest.mark.parametrize(("size", "share"), [("half of", 0.5), ("twice", 2.0)])
def test_a_scan_is_as_large_as_it_says(server: NotingServer, size: str, share: float) -> None:
    found = asyncio.run(turns.found_of_hot("", SCANS[size]))
    assert found == 50
    begins = [tuple(prompt[:HOT_SIZE]) for prompt in server.prompts]
    first = begins[0]
    uses = [number for number, begin in enumerate(begins) if begin == first]
    assert len(uses) == FIRST_USES + USES
    for earlier, later in pairwise(uses):
        once = [len(prompt) for prompt in server.prompts[earlier:later] if len(prompt) == ONCE_SIZE]
        assert later - earlier == HOT + len(once)
        assert sum(once) / POOL_TOKENS == pytest.approx(share, rel=0.05)
