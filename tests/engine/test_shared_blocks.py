"""Chats and other requests on a device that is far too small for them: what they say is what they say alone.

A real core and a real engine. Chats take slots of best-effort requests, which wait, get them back and go on; the test
asserts that all of that happened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from alignedserve.core import Request, ServiceClass
from alignedserve.decode_worker.state import DecodeCore
from alignedserve.engine.engine import Engine
from alignedserve.engine_hands import EngineHands
from alignedserve.messages import ROUTER, Command, Prefill, Send, SetTimer, Tokens, Work
from alignedserve.policy import Chunking, Choice, Layout, Order, Policy, Room
from alignedserve.running import WorkerLimits
from tests.engine.driver import prompt_of
from tests.reference import Tally, compare
from tests.samples import request, said

BLOCK, PAIRS = 4, 14
SHARED = Policy(room=Room.GROWING, blocks=Layout.BIDIRECTIONAL)
FCFS = replace(SHARED, order=Order.FCFS, chunking=Chunking.FIXED, selection=Choice.IN_ORDER)
CASES = [(SHARED, 15), (replace(SHARED, checkpoints=0.2), 14), (FCFS, 7)]  # and seeds in which all of it happens


class Worker:
    """Colocated; every piece of work takes a hundredth of a second."""

    def __init__(self, engine: Engine, policy: Policy, folder: Path) -> None:
        limits = WorkerLimits(PAIRS, BLOCK, 2 * BLOCK, max_step_tokens=32, max_batch=8)
        self.core = DecodeCore(limits, policy)
        num_places = policy.num_places(PAIRS * BLOCK)
        self.hands = EngineHands(engine, folder / "arena", 2 * BLOCK, verify=True, num_places=num_places)
        self.outputs: dict[str, list[int]] = {}
        self.work: deque[Command] = deque()
        self.now = 0.0

    def prefill(self, one: Request) -> None:
        self.outputs[one.id] = []
        self.tell(self.core.handle(said(ROUTER, Prefill(one)), self.now))

    def tell(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Send) and isinstance(command.message, Tokens):
                for output in command.message.outputs:
                    assert output.index == len(self.outputs[output.request])
                    self.outputs[output.request] += output.tokens
            elif isinstance(command, Work):
                self.work.append(command)
            else:
                assert isinstance(command, Send | SetTimer)

    def works(self, pieces: int = 1) -> None:
        for _ in range(pieces):
            if self.work:
                self.now += 0.01
                if (event := self.hands.perform(self.work.popleft())) is not None:
                    self.tell(self.core.handle(event, self.now))


@pytest.mark.parametrize("name", ["gqa-untied", "opt"])
@pytest.mark.parametrize(("policy", "seed"), CASES)
def test_what_they_say_is_what_they_say_alone(
    folder_of: Callable[[str], Path],
    engine_of: Callable[[Path, int], Engine],
    reference_of: Callable[[Path], Any],
    tally: Tally,
    tmp_path: Path,
    policy: Policy,
    seed: int,
    name: str,
) -> None:
    folder = folder_of(name)
    engine = engine_of(folder, BLOCK)
    engine.cache.fill_(float("nan"))
    worker, random = Worker(engine, policy, tmp_path), Random(seed)
    asked = dict[str, Request]()
    for number in range(14):
        service = ServiceClass.RT if number % 3 == 2 else ServiceClass.BE
        one = request(f"r{number}", max_tokens=random.randint(4, 24))
        prompt = prompt_of(number, random.randint(1, 14))
        asked[one.id] = replace(one, prompt=prompt, stop_tokens=(), service=service, arrival_at=worker.now)
        worker.prefill(asked[one.id])
        worker.works(random.randint(0, 6))
    worker.works(2000)
    assert not worker.work
    for one in asked.values():
        assert len(worker.outputs[one.id]) == one.max_tokens
        compare(reference_of(folder), one.prompt, worker.outputs[one.id], tally, f"{folder.name}, {policy}")
    assert worker.core.held == {"requests": 0, "pairs": 0, "pages": 0, "outputs": len(asked), "places": 0}
    assert worker.core.shared is not None
    counts = worker.core.shared.counts
    assert counts.num_preempted
    assert counts.num_checkpoints
    assert counts.num_restored
    assert counts.num_moved
