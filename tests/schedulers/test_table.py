"""Which scheduler a preset means, and what a prefill worker runs where classes take turns."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alignedserve.config.config import of_preset
from alignedserve.core import KvForm, WorkerLimits
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.papers.alise import Alise
from alignedserve.papers.fcfs import AlignedServePaper, DecodesFirst, PromptsFirst
from alignedserve.papers.in_order import InOrder
from alignedserve.papers.names import SchedulerName
from alignedserve.papers.rules import RULES
from alignedserve.papers.table import SCHEDULERS
from alignedserve.papers.wrapping import WholePrompts
from alignedserve.schedulers.table import scheduler_of
from alignedserve.scheduling.policy import Chunking, Policy, Room
from alignedserve.worker.setup import WorkerSetup
from alignedserve.worker.step.view import StepView
from tests.worker.step.test_selection import chat, document, moment, ran, seating, waits

ROUND = Policy(SchedulerName.ROUND_ROBIN, chunking=Chunking.FIXED)
BY_ARRIVAL = [name for name, rules in RULES.items() if not rules.fills and "chunking" not in rules.takes]


@pytest.mark.parametrize(
    ("preset", "name"),
    [
        ("aligned", "Aligned"),
        ("aligned-multi-resource", "BestFit"),
        ("bros", "Bros"),
        ("shortest", "InOrder"),
        ("accelgen", "AccelGen"),
        ("accelgen-no-chunk", "WholePrompts"),
        ("alise", "Alise"),
        ("alise-defer", "Alise"),
        ("aligned-no-order", "InOrder"),
        ("fcfs", "DecodesFirst"),
        ("vllm-fcfs", "PromptsFirst"),
        ("vllm-chunked", "DecodesFirst"),
        ("orca", "DecodesFirst"),
        ("sarathi", "DecodesFirst"),
        ("fastgen", "InOrder"),
        ("distserve", "PromptsFirst"),
        ("alignedserve-paper", "AlignedServePaper"),
        ("tgi", "Tgi"),
        ("round-robin", "RoundRobin"),
        ("mlfq", "Mlfq"),
        ("fastserve", "FastServe"),
        ("apt-serve", "AptServe"),
    ],
)
def test_each_preset_has_its_scheduler(preset: str, name: str) -> None:
    assert type(scheduler_of(of_preset(preset, {}).policy, 8)).__name__ == name


@pytest.mark.parametrize("layers", [0, 24])
def test_only_our_own_schedulers_pause_their_steps(layers: int) -> None:
    """A rival's preset is to run what its paper has."""
    limits = WorkerLimits(num_blocks=64, block_size=4, page_size=8, max_step_tokens=64, max_batch=8)
    cores = {
        name: decode_core(WorkerSetup(limits, of_preset(name, {}).policy, layers=layers))
        for name in ("aligned", "aligned-multi-resource", "bros", "bros-plain", "fcfs")
    }
    pause = [name for name, core in cores.items() if core.memory.context(0.0).layers]
    assert pause == (["aligned", "aligned-multi-resource"] if layers else [])


@pytest.mark.parametrize("name", BY_ARRIVAL)
@pytest.mark.parametrize("chunking", Chunking)
@pytest.mark.parametrize("room", Room)
def test_settings_of_a_system_may_ask_for_another_rule(name: SchedulerName, chunking: Chunking, room: Room) -> None:
    policy, at_once = Policy(name, chunking, room), chunking is Chunking.SLO or room is Room.CHUNKS
    if policy.problem is not None:
        return
    rule = InOrder if at_once else PromptsFirst if chunking is Chunking.NONE else DecodesFirst
    assert isinstance(scheduler_of(policy), rule)
    found = scheduler_of(policy, 8)
    assert isinstance(found.wrapped if isinstance(found, AlignedServePaper) else found, rule)


@pytest.mark.parametrize(("is_prefill", "expected"), [(False, [("a", 64)]), (True, [("a", 64), ("b", 64)])])
def test_classes_take_turns_where_decodes_run_only(is_prefill: bool, expected: list[tuple[str, int]]) -> None:
    at = moment(ROUND)
    prompts = [chat("a", 1.0), document("b")]
    for prompt in prompts:
        prompt.kv = KvForm((0, 1, 2, 3))
    scheduler = scheduler_of(ROUND) if is_prefill else scheduler_of(ROUND, 8)
    assert ran(scheduler.plan(StepView((), prompts, waits((), at), at, seating(0, at)))) == expected


def test_requests_by_arrival_are_planned_in_order_where_promises_bound_the_step() -> None:
    at = moment(Policy(SchedulerName.FCFS, chunking=Chunking.SLO))
    prompts = [document("a"), chat("b", 1.0)]
    for prompt in prompts:
        prompt.kv = KvForm((0, 1, 2, 3))
    plan = scheduler_of(at.policy).plan(StepView((), prompts, waits((), at), at, seating(0, at)))
    assert ran(plan) == [("a", 64), ("b", 64)]


def test_a_scheduler_that_wraps_another_is_the_other_but_for_its_plans() -> None:
    policy = of_preset("alise", {}).policy
    whole = scheduler_of(replace(policy, chunking=Chunking.NONE), 8)
    assert isinstance(whole, WholePrompts)
    assert isinstance(whole.wrapped, Alise)
    assert whole.levels is whole.wrapped
    assert (whole.most, whole.most_seated) == (8, 8)
    seated = [document("long", 64, output=3), document("short", 16, output=3)]
    assert whole.leaving((), seated, moment(policy)) is whole.wrapped.leaving((), seated, moment(policy))


def test_prompts_that_are_never_cut_run_alone() -> None:
    at = moment(Policy(chunking=Chunking.NONE))
    decodes, prompts = [chat("c", 1.0, output=3)], [document("d", 200)]
    prompts[0].kv = KvForm(tuple(range(16)))
    scheduler = scheduler_of(at.policy, 8)
    assert ran(scheduler.plan(StepView(decodes, prompts, waits((), at), at, seating(0, at)))) == [("d", 200)]
    plan = scheduler.plan(StepView(decodes, (), waits((), at), at, seating(0, at)))
    assert (plan.decodes, plan.chunks) == (decodes, ())


@pytest.mark.parametrize(("preset", "expected"), [("vllm-fcfs", "ab"), ("vllm-chunked", "abc")])
def test_prompts_that_come_first_fill_a_step_to_its_last_token(preset: str, expected: str) -> None:
    """The step has 512 tokens, and 112 are left for the third prompt: it is cut, or waits for the next step."""
    policy = of_preset(preset, {}).policy
    at, prompts = moment(policy), [document("a", 100), document("b", 300), document("c", 150)]
    found = ran(scheduler_of(policy, 8).plan(StepView((), prompts, waits((), at), at, seating(0, at))))
    assert found == [("a", 100), ("b", 300), ("c", 112)][: len(expected)]


@pytest.mark.parametrize(("prompts", "decodes", "expected"), [("p", "", "p"), ("p", "d", "d"), ("pq", "d", "pq")])
def test_tgi_lets_decodes_go_on_until_enough_prompts_wait(prompts: str, decodes: str, expected: str) -> None:
    """A prompt in each step would stop decodes, and prompts would always wait for the longest."""
    policy = of_preset("tgi", {}).policy
    at, seated = moment(policy), [document(name) for name in prompts]
    view = StepView([document(name, output=3) for name in decodes], seated, waits((), at), at, seating(0, at))
    assert "".join(name for name, _ in ran(scheduler_of(policy, 8).plan(view))) == expected


def test_a_step_counts_what_a_chunk_after_hidden_vectors_makes_again() -> None:
    """Else the step is predicted to take less time than a prompt from its beginning."""
    at, prompt = moment(Policy(SchedulerName.FCFS, chunking=Chunking.FIXED)), document("p")
    prompt.kv, prompt.prefix = KvForm((0, 1, 2, 3), form="hidden"), 40
    plan = scheduler_of(at.policy).plan(StepView((), [prompt], waits((), at), at, seating(0, at)))
    assert (ran(plan), plan.shape.remade) == ([("p", 24)], 40)


def test_mlfq_runs_prompts_by_what_they_were_served() -> None:
    """A prompt that is recomputed after 40 tokens is in a lower level than a new one, which came later."""
    at = moment(of_preset("mlfq", {}).policy)
    served, new = document("served", 64), document("new", 64)
    served.output.extend(range(40))
    for prompt in (served, new):
        prompt.kv = KvForm(tuple(range(8)))
    plan = scheduler_of(at.policy, 8).plan(StepView((), [served, new], waits((), at), at, seating(0, at)))
    assert [name for name, _ in ran(plan)] == ["new", "served"]


def test_every_name_has_a_scheduler() -> None:
    assert set(SCHEDULERS) == set(SchedulerName)
