"""Requests with slow grammars: how many of them a step has, and what that leaves to others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest

from alignedserve.core import Request, Sampling, StepPlan, StepResult, WorkerLimits
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.protocol.commands import CopyIn, PrepareSyntax, RunStep
from alignedserve.protocol.events import CopiedIn, Event, MemberJoined, StepDone, SyntaxReady
from alignedserve.protocol.messages import Batch
from alignedserve.worker.pace import FREE_S, WAITS
from alignedserve.worker.setup import WorkerSetup
from tests.samples import POOL_MEMBER, entry, request, said

LIMITS = WorkerLimits(num_blocks=2000, block_size=4, page_size=8, max_step_tokens=64, max_batch=32)
STEP_S, SLOW_S = 0.002, 0.025


def chat(name: str, caller: str = "victim") -> Request:
    return replace(request(name, max_tokens=4000), salt=caller)


def masked(name: str, caller: str = "attacker") -> Request:
    return replace(chat(name, caller), sampling=Sampling(syntax="a slow grammar"))


class Bench:
    """Runs a decode worker by a clock: a step takes STEP_S, or as long as its masks if that is longer."""

    def __init__(self, takes: Mapping[str, float], *requests: Request) -> None:
        self.takes, self.now = takes, 0.0
        self.worker = decode_core(WorkerSetup(LIMITS))
        self.plan: StepPlan | None = None
        self.hears(MemberJoined(POOL_MEMBER))
        self.hears(said("pool-0", Batch(tuple(entry(each, (number,)) for number, each in enumerate(requests)))))
        self.tokens, self.longest_s = Counter[str](), 0.0

    def hears(self, event: Event) -> None:
        for command in self.worker.handle(event, self.now):
            match command:
                case RunStep(plan):
                    self.plan = plan
                case PrepareSyntax(wanted):
                    self.hears(SyntaxReady(wanted.id, wanted.attempt))
                case CopyIn(number=number):
                    self.hears(CopiedIn(number, intact=True))

    def run(self, seconds: float) -> None:
        """Run steps for so long."""
        until = self.now + seconds
        while self.now < until:
            plan = self.plan
            assert plan is not None, "no step runs"
            self.plan, names = None, [part.request for part in plan.decodes]
            masks = tuple((name, self.takes[name]) for name in names if name in self.takes)
            step_s = max(STEP_S, sum(took for _, took in masks))
            self.longest_s, self.now = max(self.longest_s, step_s), self.now + step_s
            self.tokens.update(names)
            result = StepResult(plan.number, tuple((name, 7) for name in names), masks=masks)
            self.hears(StepDone(result, step_s))


def test_beside_slow_grammars_others_wait_for_one_mask_at_most_and_for_a_part_of_the_time() -> None:
    slow = [f"slow-{number}" for number in range(8)]
    bench = Bench(dict.fromkeys(slow, SLOW_S), chat("chat"), *map(masked, slow))
    bench.run(2.0)  # until all are known
    bench.tokens.clear()
    bench.longest_s = 0.0
    bench.run(5.0)
    assert bench.longest_s == SLOW_S, "one mask"
    alone = 5.0 / STEP_S
    assert bench.tokens["chat"] >= alone / (1 + WAITS) * 0.95
    of_each = [bench.tokens[name] for name in slow]
    assert max(of_each) - min(of_each) <= 1, "they take turns"
    assert sum(of_each) >= 0.9 * 5.0 * WAITS / (1 + WAITS) / SLOW_S


def test_callers_take_turns_by_what_their_masks_took() -> None:
    many = [f"many-{number}" for number in range(6)]
    takes = {**dict.fromkeys(many, SLOW_S), "slower": 2 * SLOW_S}
    bench = Bench(takes, chat("chat"), masked("slower", "other"), *map(masked, many))
    bench.run(6.0)
    used = bench.tokens["slower"] * 2 * SLOW_S, sum(bench.tokens[name] for name in many) * SLOW_S
    assert used[0] == pytest.approx(used[1], abs=6 * SLOW_S)


@pytest.mark.parametrize("each_s", [0.0, FREE_S / 16])
def test_usual_grammars_run_in_each_step(each_s: float) -> None:
    names = [f"form-{number}" for number in range(16)]
    bench = Bench(dict.fromkeys(names, each_s) if each_s else {}, chat("chat"), *map(masked, names))
    bench.run(0.1)
    assert bench.tokens["chat"] - min(bench.tokens[name] for name in names) <= 16  # until their masks are known


def test_slow_grammars_alone_run_one_after_the_other() -> None:
    slow = [f"slow-{number}" for number in range(3)]
    bench = Bench(dict.fromkeys(slow, SLOW_S), *map(masked, slow))
    bench.run(3.0)
    assert bench.longest_s <= 2 * SLOW_S  # before they are known
    assert sum(bench.tokens.values()) == pytest.approx(3.0 / SLOW_S, rel=0.05)


def test_what_masks_took_is_no_time_of_steps() -> None:
    """Else the worker would think its machine slow, and the router would refuse chats."""
    slow = [f"slow-{number}" for number in range(4)]
    bench = Bench(dict.fromkeys(slow, SLOW_S), chat("chat"), *map(masked, slow))
    bench.run(5.0)
    assert bench.worker.pace.times.most_s < SLOW_S
