"""Tests with a worker's core that chooses the chunks and the real engine that runs them: the cuts change no token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alignedserve.core import Slo, WorkerLimits
from alignedserve.cost.fit import OnlineCost, Point
from alignedserve.cost.model import Shape
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.engine.engine import Engine
from alignedserve.papers.names import SchedulerName
from alignedserve.protocol.commands import Command, RunStep, Send
from alignedserve.protocol.events import StepDone
from alignedserve.protocol.messages import ROUTER, Prefill, Tokens
from alignedserve.scheduling.policy import Chunking, Policy, Room
from alignedserve.worker.setup import WorkerSetup
from tests.conftest import SOAK, examples
from tests.engine.driver import prompt_of
from tests.models import MODELS
from tests.reference import Tally, compare
from tests.samples import request, said

POLICIES = [
    Policy(),
    Policy(room=Room.CHUNKS),
    Policy(room=Room.CHUNKS),
    Policy(chunking=Chunking.FIXED),
    Policy(chunking=Chunking.NONE),
    Policy(SchedulerName.FCFS, Chunking.FIXED, Room.CHUNKS),
    Policy(SchedulerName.ACCELGEN_NO_BATCH, room=Room.CHUNKS),
]
SHAPES = [
    Shape.build([(1 << bits, 0)] * chunks, [50] * decodes)
    for bits in range(7)
    for chunks in (0, 1)
    for decodes in (0, 1, 3)
]
NUM_OUTPUT, BLOCKS, BLOCK = 6, 12, 16
# Chunks of any length are cut for all models by test_engine.py: here it matters who chooses them.
NAMES = [*MODELS] if SOAK else ["mha-tied", "mistral", "opt", "deepseek-v2", "gemma2"]


@given(
    name=st.sampled_from(NAMES),
    policy=st.sampled_from(POLICIES),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    ttfts_s=st.lists(st.floats(0.01, 1.0), min_size=5, max_size=5),
    budget=st.integers(3, 64),
)
@settings(deadline=None, max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_greedy_output_with_any_budgets(
    folder_of: Callable[[str], Path],
    engine_of: Callable[[Path, int], Engine],
    reference_of: Callable[[Path], Any],
    tally: Tally,
    name: str,
    policy: Policy,
    lengths: list[int],
    ttfts_s: list[float],
    budget: int,
) -> None:
    folder = folder_of(name)
    engine = engine_of(folder, BLOCK)
    engine.cache.fill_(float("nan"))
    costs = OnlineCost([Point(shape, 0.01 + 1e-3 * shape.tokens) for shape in SHAPES if shape.tokens])
    limits = WorkerLimits(BLOCKS, BLOCK, BLOCK, max_step_tokens=budget, max_batch=3)
    core = decode_core(WorkerSetup(limits, policy, costs))
    prompts = {f"r{at}": prompt_of(at, length) for at, length in enumerate(lengths)}
    outputs: dict[str, list[int]] = {number: [] for number in prompts}
    commands = list[Command]()
    for (number, prompt), ttft_s in zip(prompts.items(), ttfts_s, strict=False):
        new_request = replace(
            request(number, max_tokens=NUM_OUTPUT), prompt=prompt, stop_tokens=(), slo=Slo(ttft_s=ttft_s)
        )
        commands += core.handle(said(ROUTER, Prefill(new_request)), 0.0)
    now = 0.0
    while commands:
        now += 0.02
        steps = [command.plan for command in commands if isinstance(command, RunStep)]
        for command in commands:
            if isinstance(command, Send) and isinstance(command.message, Tokens):
                for output in command.message.outputs:
                    outputs[output.request] += output.tokens
        commands = core.handle(StepDone(engine.step(steps[0]), 0.02), now) if steps else []
    for number, prompt in prompts.items():
        compare(reference_of(folder), prompt, outputs[number], tally, f"{name}, {policy}")
