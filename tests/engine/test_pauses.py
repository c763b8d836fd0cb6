"""Tests of steps that pause between two layers while another runs: all requests say what they say without pauses."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alignedserve.core import StepPlan, StepResult
from alignedserve.engine.device.devices import CPU
from alignedserve.engine.engine import Engine
from alignedserve.engine.in_order import DeviceQueue
from alignedserve.engine.sampling.reading import Done
from alignedserve.kernels.common.decoder import Pauses
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.native.kernels import Native
from alignedserve.protocol.events import Event, StepDone
from tests.adapters import make_adapter, named, with_adapter
from tests.engine.driver import Driver, Live, prompt_of
from tests.kernels.every import on_native_kernels
from tests.reference import Tally, compare

ROWS, TOKENS = 64, 6


@on_native_kernels
@pytest.mark.parametrize("name", ["gqa-untied", "opt"])
def test_pauses_between_all_layers_change_nothing(
    kernels: Native,
    folder_of: Callable[[str], Path],
    reference_of: Callable[[Path], Any],
    tmp_path: Path,
    tally: Tally,
    name: str,
) -> None:
    """A chat's prompt runs between the first two layers of each step of others, and decodes between the next ones."""
    folder = folder_of(name)
    driver = Driver(Engine(folder, num_blocks=200, block_size=4, dtype="float32", kernels=kernels), 7)
    pauses = driver.engine.pauses(ROWS)
    if pauses is None:  # torch is faster
        assert kernels.library.isa == "generic"
        return
    lives = [driver.start_either_way(f"r{number}", prompt_of(number, 9 + 4 * number), 40) for number in range(3)]
    made = make_adapter(folder, tmp_path / "adapter", seed=1)
    lives[2].adapter = named("adapter", made, folder)
    chats, num_pauses = list[Live](), 0

    def amid() -> None:
        nonlocal num_pauses
        num_pauses += 1
        pauses.work = lambda: None  # a step in a pause does not pause
        chat = chats[-1]
        driver.steps += 1
        number, parts = driver.steps, ((chat.chunk(99),), ()) if chat.in_prompt else ((), (chat.decode(),))
        done = driver.engine.begin_amid(StepPlan(number, *parts)).result()
        chat.output.append(dict(done.tokens)[chat.name])
        pauses.work = amid
        pauses.ask()

    for step in range(TOKENS):
        chats.append(driver.start(f"chat{step}", prompt_of(50 + step, 7), 20))
        pauses.work = amid
        pauses.ask()
        number, driver.steps = driver.steps + 100, driver.steps + 1
        chunks = tuple(live.chunk(11) for live in lives if live.in_prompt)
        in_chunk = {chunk.request for chunk in chunks}
        decodes = tuple(live.decode() for live in lives if live.name not in in_chunk)
        sampled = dict(driver.engine.step(StepPlan(number, chunks, decodes)).tokens)
        for live in lives:
            if live.name in sampled:
                live.output.append(sampled[live.name])
    pauses.work = lambda: None
    assert num_pauses == TOKENS * (driver.engine.config.num_layers - 1) > 0
    for live in (*lives, *chats):
        model = reference_of(folder) if live.adapter is None else with_adapter(folder, made)
        compare(model, live.prompt, live.output, tally, f"{name}, {live.name}, with pauses")


def test_an_engine_without_the_one_call_makes_no_pauses(folder_of: Callable[[str], Path]) -> None:
    engine = Engine(folder_of("opt"), num_blocks=4, dtype="float32", kernels=Reference())
    assert engine.pauses(ROWS) is None


# --- The thread


def test_the_seconds_of_a_step_are_those_of_its_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses, posts = Pauses(), queue.Queue[Event | Exception]()
    clock = [0.0]
    monkeypatch.setattr("alignedserve.engine.in_order.perf_counter", lambda: clock[0])
    in_order = DeviceQueue(CPU, pauses)

    def result(number: int) -> Done:
        return Done(StepResult(number, ()))

    def begin_amid(plan: StepPlan) -> Done:
        clock[0] += 5.0
        return result(plan.number)

    def begin(plan: StepPlan) -> Done:
        clock[0] += 1.0
        in_order.step_amid(StepPlan(2), begin_amid, posts.put)
        pauses.take()
        clock[0] += 2.0
        return result(plan.number)

    in_order.step(StepPlan(1), begin, posts.put)
    done = [posts.get(timeout=10) for _ in range(2)]
    in_order.close()
    took = {event.result.number: event.seconds for event in done if isinstance(event, StepDone)}
    assert took == {2: 5.0, 1: 3.0}


def test_a_step_for_a_pause_runs_behind_a_step_that_has_ended() -> None:
    in_order, posts = DeviceQueue(CPU, Pauses()), queue.Queue[Event | Exception]()
    for number, run in ((1, in_order.step), (2, in_order.step_amid)):
        run(StepPlan(number), lambda plan: Done(StepResult(plan.number, ())), posts.put)
    done = [posts.get(timeout=10) for _ in range(2)]
    in_order.close()
    assert {event.result.number for event in done if isinstance(event, StepDone)} == {1, 2}


def test_work_that_is_queued_before_a_step_runs_before_the_steps_of_its_pauses() -> None:
    """A copy of what a request left behind read blocks that a chat's step had written again."""
    pauses, posts, log = Pauses(), queue.Queue[Event | Exception](), list[str]()
    in_order = DeviceQueue(CPU, pauses)

    def begin(plan: StepPlan) -> Done:
        log.append(f"step {plan.number}")
        if plan.number == 1:
            in_order.step_amid(StepPlan(2), begin, posts.put)
            pauses.take()
            in_order.do(lambda: False, lambda: log.append("copy"), posts.put)
            in_order.step(StepPlan(3), begin, posts.put)
            in_order.step_amid(StepPlan(4), begin, posts.put)
        return Done(StepResult(plan.number, ()))

    in_order.step(StepPlan(1), begin, posts.put)
    for _ in range(4):
        assert isinstance(posts.get(timeout=10), StepDone)
    in_order.close()
    assert log == ["step 1", "step 2", "copy", "step 3", "step 4"]


def test_an_error_of_a_step_in_a_pause_ends_the_work() -> None:
    in_order, posts = DeviceQueue(CPU, Pauses()), queue.Queue[Event | Exception]()

    def fails(plan: StepPlan) -> Done:
        raise KeyError(plan.number)

    in_order.step_amid(StepPlan(1), fails, posts.put)
    assert isinstance(posts.get(timeout=10), KeyError)
    in_order.close()
