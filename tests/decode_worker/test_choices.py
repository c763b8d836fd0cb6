"""Choices of a prompt get their first tokens with the first choice, or wait on as other prompts do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from alignedserve.core import Request, Sampling, StepFailure, StepPlan, StepResult, WorkerLimits
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.lab.fuzzing.worker_views import blocks_of
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.protocol.commands import Command, RunStep, Send
from alignedserve.protocol.events import Event, StepDone
from alignedserve.protocol.form_orders import CopySlots
from alignedserve.protocol.messages import ROUTER, Cancel, Output, Prefill, Tokens
from alignedserve.scheduling.policy import DEFAULT_POLICY, Policy
from alignedserve.worker.setup import WorkerSetup
from alignedserve.worker.step.states import State
from tests.decode_worker.test_pausing import paused
from tests.samples import request, said
from tests.worker.cores import MakeCore

LIMITS = WorkerLimits(num_blocks=60, block_size=4, page_size=8, max_step_tokens=64, max_batch=8)
OTHER = request("other", prompt=5)  # in whose step the choices come
SIZE = LIMITS.block_size


def choices(count: int = 3, prompt: int = 14, max_tokens: int = 5, **fields: Any) -> list[Request]:
    asked = replace(request("c", max_tokens=max_tokens), prompt=tuple(range(50, 50 + prompt)), **fields)
    return [replace(asked, id=f"c{seed}", sampling=replace(asked.sampling, seed=seed)) for seed in range(count)]


class Bench:
    """A worker in whose first step choices of a prompt have come. Each request that samples gets token 7."""

    def __init__(self, core: MakeCore = decode_core, policy: Policy = DEFAULT_POLICY, **limits: Any) -> None:
        self.core = core(WorkerSetup(replace(LIMITS, **limits), policy))
        self.steps, self.copies, self.outputs = list[StepPlan](), list[CopySlots](), list[Output]()
        self.taken: tuple[int, ...] = ()  # blocks that no request has
        self.hears(said(ROUTER, Prefill(OTHER)))

    def comes(self, *some: Request) -> Bench:
        for each in some:
            self.hears(said(ROUTER, Prefill(each)))
        return self

    def hears(self, event: Event) -> None:
        self.take(self.core.handle(event, 0.0))

    def take(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case RunStep(plan):
                    self.steps.append(plan)
                case CopySlots():
                    self.copies.append(command)
                case Send(message=Tokens(outputs)):
                    self.outputs += outputs

    def ends(self, failure: StepFailure | None = None, unsampled: tuple[str, ...] = ()) -> None:
        """End the newest step."""
        plan = self.steps[-1]
        wanted = [part.request for part in (*plan.parts, *plan.draws) if part.sampling is not None and failure is None]
        tokens = tuple((name, 7) for name in wanted if name not in unsampled)
        self.hears(StepDone(StepResult(plan.number, tokens, unsampled, failure=failure), 0.01))
        assert sorted((*blocks_of(self.core), *self.taken)) == [*range(LIMITS.num_blocks)]

    @property
    def chunks(self) -> dict[str, int]:
        """Return the prompts in the newest step, and how many tokens of each run."""
        return {chunk.request: len(chunk.tokens) for chunk in self.steps[-1].chunks}

    @property
    def draws(self) -> list[str]:
        return [draw.request for draw in self.steps[-1].draws]

    @property
    def begun(self) -> list[str]:
        return [output.request for output in self.outputs if not output.index]

    def blocks(self, name: str) -> tuple[int, ...]:
        [running] = self.core.here.named(name, State.RESIDENT)
        return running.blocks


@pytest.mark.parametrize("core", [decode_core, PrefillCore])
def test_nothing_of_the_prompt_runs_twice(core: MakeCore) -> None:
    bench = Bench(core).comes(*choices())
    bench.ends()
    assert (bench.chunks, bench.draws) == ({"c0": 14}, ["c1", "c2"])
    bench.ends()
    assert bench.begun == ["other", "c0", "c1", "c2"]
    first, *others = (bench.blocks(f"c{at}") for at in range(3))
    [copy] = bench.copies
    assert copy.moves == tuple((first[3] * SIZE + at, of[3] * SIZE + at) for of in others for at in range(2))
    assert {blocks[:3] for blocks in (first, *others)} == {first[:3]}
    if core is decode_core:
        assert [(decode.request, decode.start, decode.token) for decode in bench.steps[-1].decodes][1:] == [
            (f"c{at}", 14, 7) for at in range(3)
        ]


def test_a_choice_that_comes_late_shares_full_blocks() -> None:
    bench = Bench()
    bench.ends()
    [first, *others] = choices()
    bench.comes(first)
    bench.ends()
    bench.comes(*others)
    bench.ends()
    assert (bench.chunks, bench.draws) == ({"c1": 2}, ["c2"]), "one runs the end for both"


@pytest.mark.parametrize("prompt", [2, 16])
def test_a_prompt_within_a_block_and_one_of_full_blocks(prompt: int) -> None:
    bench = Bench().comes(*choices(prompt=prompt))
    bench.ends()
    bench.ends()
    assert bench.begun == ["other", "c0", "c1", "c2"]
    assert len(bench.copies[0].moves) == 2 * (2 if prompt == 2 else SIZE)


def test_choices_of_a_single_token_are_done_with_the_first() -> None:
    bench = Bench().comes(*choices(max_tokens=1))
    bench.ends()
    bench.ends()
    assert [output.request for output in bench.outputs if output.finish] == ["c0", "c1", "c2"]


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": (*range(50, 63), 99)},
        {"salt": "another tenant"},
        {"sampling": Sampling(temperature=0.5)},
        {"sampling": Sampling(prompt_logprobs=0)},
        {"emitted": (7,)},
    ],
    ids=["another prompt", "another tenant", "other rules", "logits of all tokens", "a later attempt"],
)
def test_other_requests_draw_nothing(other: dict[str, Any]) -> None:
    [first, second] = choices(2)
    bench = Bench().comes(first, replace(second, **other))
    bench.ends()
    assert not bench.draws


@pytest.mark.parametrize(
    "policy",
    [
        replace(DEFAULT_POLICY, reuse=False),
        replace(DEFAULT_POLICY, memory="two_ended"),
        replace(DEFAULT_POLICY, memory="hybrid"),
    ],
    ids=["nothing is shared", "two-ended blocks", "hidden vectors"],
)
def test_where_no_block_is_shared_each_runs_by_itself(policy: Policy) -> None:
    bench = Bench(policy=policy).comes(*choices())
    bench.ends()
    assert bench.chunks == {"c0": 14, "c1": 14, "c2": 14}


def test_where_beginnings_are_given_back_each_runs_the_end() -> None:
    bench = Bench(reach=64).comes(*choices())
    bench.ends()
    bench.ends()
    assert bench.chunks == {"c1": 2, "c2": 2}


def test_a_choice_without_a_seat_waits() -> None:
    bench = Bench(max_batch=3).comes(*choices())
    bench.ends()
    assert (bench.chunks, bench.draws) == ({"c0": 14}, [])
    bench.ends()
    assert bench.begun == ["other", "c0"]


@pytest.mark.parametrize("gone", ["c0", "c1"])
def test_the_token_of_a_choice_is_dropped_that_has_nothing_to_share_or_has_gone(gone: str) -> None:
    bench = Bench().comes(*choices())
    bench.ends()
    bench.hears(said(ROUTER, Cancel(gone, 0)))
    bench.ends()
    if gone == "c1":
        assert bench.begun == ["other", "c0", "c2"]
    else:
        assert (bench.begun, bench.chunks, bench.draws) == (["other"], {"c1": 14}, ["c2"])


def test_the_token_is_dropped_where_memory_is_gone_when_the_step_ends() -> None:
    bench = Bench().comes(*choices())
    bench.ends()
    assert bench.draws == ["c1", "c2"]
    memory = bench.core.memory
    bench.taken = memory.take(memory.num_free - 1) or ()
    bench.ends()
    assert bench.begun == ["other", "c0"]
    memory.give(bench.taken)
    bench.taken = ()
    bench.ends()
    assert bench.chunks.keys() <= {"c1", "c2"}


def test_a_step_that_fails_leaves_all_as_it_was() -> None:
    bench = Bench().comes(*choices())
    bench.ends()
    bench.ends(failure=StepFailure("no memory"))
    assert (bench.begun, bench.chunks.keys()) == (["other"], {"c0"})


def test_a_choice_without_a_possible_token_ends_by_itself() -> None:
    bench = Bench().comes(*choices())
    bench.ends()
    bench.ends(unsampled=("c1",))
    assert [output.request for output in bench.outputs if output.finish] == ["c1"]
    assert bench.begun == ["other", "c0", "c1", "c2"]


def test_choices_of_a_chat_draw_in_a_pause() -> None:
    """The copy comes behind the step that goes on then, and their decodes in the step behind that."""
    bench = paused(policy=Policy())
    [step], [amid] = bench.steps, bench.amid
    bench.comes(*choices(2))
    bench.ends(amid)
    [_, amid] = bench.amid
    assert ([part.request for part in amid.parts], [draw.request for draw in amid.draws]) == (["c0"], ["c1"])
    commands = bench.core.handle(StepDone(StepResult(amid.number, (("c0", 7), ("c1", 7))), 0.02), bench.now)
    assert [len(command.moves) for command in commands if isinstance(command, CopySlots)] == [2]
    bench.ends(step)
    assert {"c0", "c1"} <= {decode.request for decode in bench.steps[-1].decodes}
