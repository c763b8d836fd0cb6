"""Choices of steps under all options: within time, tokens and memory, never empty, and without starvation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf, isclose

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from alignedserve.core import NO_KV, Chunk, KvForm
from alignedserve.cost.model import Coefficients, CostModel, Kind, Shape
from alignedserve.papers.best_fit import Left, Window, windows
from alignedserve.papers.names import SchedulerName
from alignedserve.papers.policy import PaperPolicy
from alignedserve.scheduling.policy import Chunking, Policy, Room
from alignedserve.scheduling.slo import Late, StepTimes
from alignedserve.worker.step.blocks import Blocks, NamedBlocks
from alignedserve.worker.step.device_pages import DevicePages
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.seating import Seating
from alignedserve.worker.step.view import PlannedStep
from alignedserve.worker.step.waiting_prompts import WaitingPrompts
from tests.worker.step.test_selection import (
    COST,
    NOW,
    TIMES,
    chat,
    choose,
    document,
    moment,
    ran,
    seating,
    select,
    waits,
)

BLOCK = 16
BEST_FIT = Policy(SchedulerName.BEST_FIT)
OURS = (SchedulerName.ALIGNED, SchedulerName.BEST_FIT)

policies = (
    st.builds(
        PaperPolicy,
        st.sampled_from(SchedulerName),
        chunking=st.sampled_from(Chunking),
        room=st.sampled_from([Room.WHOLE, Room.CHUNKS]),
        late=st.sampled_from(Late),
        window_s=st.sampled_from([0.0, 0.75, 100.0]),
        long_prompt=st.sampled_from([100, 4096]),
        budget_pivots=st.sampled_from([0.1, 4.0]),
    )
    .filter(lambda policy: policy.problem is None)
    .filter(lambda policy: not policy.is_plain)
)
lengths = st.integers(1, 300)
chats = st.builds(chat, st.just(""), st.floats(-1, 3), lengths, st.sampled_from([0, 0, 0, 3]))
documents = st.builds(document, st.just(""), lengths, st.sampled_from([0, 0, 0, 3]), st.floats(0.01, 1000))


@st.composite
def crowds(draw: st.DrawFn) -> tuple[list[WorkerRequest], list[WorkerRequest], list[WorkerRequest]]:
    """Draw decodes, seated prompts, and waiting prompts."""
    all_ = draw(st.lists(st.one_of(chats, documents), min_size=1, max_size=14))
    decodes, prompts, waiting = list[WorkerRequest](), list[WorkerRequest](), list[WorkerRequest]()
    for number, running in enumerate(all_):
        running.request = running.promise.request = replace(running.request, id=f"r{number}")
        if running.output:
            running.kv = KvForm(tuple(range(-(-running.num_tokens // BLOCK))))
            decodes.append(running)
        elif draw(st.booleans()):
            running.kv = KvForm(tuple(range(-(-running.num_tokens // BLOCK))))
            running.prefix = draw(st.integers(0, running.num_tokens - 1))
            prompts.append(running)
        else:
            waiting.append(running)
    return decodes, prompts, waiting


some = settings(suppress_health_check=[HealthCheck.too_slow])  # many requests are drawn for each example


class TestWhateverTheOptions:
    @given(policies, crowds(), st.integers(20, 512), st.integers(0, 60))
    @some
    def test_tokens_and_memory_are_never_exceeded(
        self, policy: Policy, crowd: tuple[list[WorkerRequest], ...], room: int, free: int
    ) -> None:
        decodes, prompts, waiting = crowd
        before = {running.request.id: len(running.blocks) for running in prompts}
        found = select(decodes, prompts, waiting, moment(policy, room), free)
        sizes = dict(ran(found))
        assert len(sizes) == len(found.decodes) + len(found.chunks)
        assert sum(sizes.values()) <= room
        taken = sum(len(running.blocks) - before.get(running.request.id, 0) for running in (*prompts, *waiting))
        assert 0 <= taken <= free
        for running in (*prompts, *waiting):
            size = sizes.get(running.request.id, 0)
            assert len(running.blocks) * BLOCK >= (running.prefix + size if size else 0)
            assert not size or running.request.id in before or running in found.admitted
        for chunk in found.chunks:
            assert (chunk.sampling is not None) == (chunk.start + len(chunk.tokens) == len(prompt_of(chunk, crowd)))

    @given(policies, crowds(), st.integers(20, 512), st.integers(0, 60))
    @some
    def test_a_step_is_never_empty_while_anything_can_run(
        self, policy: Policy, crowd: tuple[list[WorkerRequest], ...], room: int, free: int
    ) -> None:
        decodes, prompts, waiting = crowd
        fits = all(-(-running.num_tokens // BLOCK) <= free for running in waiting)
        found = select(decodes, prompts, waiting, moment(policy, room), free)
        if decodes or prompts or (waiting and fits):
            assert found.decodes or found.chunks

    @given(crowds(), st.integers(20, 512), st.sampled_from(OURS))
    @some
    def test_a_step_is_in_time_for_all_requests_that_can_be(
        self, crowd: tuple[list[WorkerRequest], ...], room: int, scheduler: SchedulerName
    ) -> None:
        """Exceptions are one block of tokens of the first real-time prompt, and a request that runs alone."""
        decodes, prompts, waiting = crowd
        at = moment(Policy(scheduler), room)
        found = select(decodes, prompts, waiting, at, 1000)
        sizes = [size for _, size in ran(found)]
        least_s = min((left_s(running) for running in decodes if left_s(running) >= 0.05), default=inf)
        late_alone = [running for running in (*decodes, *prompts, *waiting) if left_s(running) < 0.05]
        if len(sizes) > 1 and not late_alone:
            assert found.predicted_s <= least_s + COST.seconds(Shape.build([(BLOCK, 0)]))

    @given(crowds(), st.sampled_from(OURS))
    @some
    def test_every_urgent_request_that_can_fit_is_in(
        self, crowd: tuple[list[WorkerRequest], ...], scheduler: SchedulerName
    ) -> None:
        decodes, prompts, waiting = crowd
        rt = [running for running in (*decodes, *prompts, *waiting) if running.promise.is_rt]
        times = {running.request.id: running.promise.standing(NOW, running.work(256), TIMES) for running in rt}
        urgent = [running for running in rt if times[running.request.id].slack_s <= TIMES.most_s]
        must = [
            *(running for running in decodes if running.promise.is_rt),
            *(running for running in urgent if not running.decodes),
        ]
        shape = Shape.build([(running.num_ahead, running.prefix) for running in must if not running.decodes], [
            running.prefix for running in must if running.decodes
        ])  # fmt: skip
        later_s = TIMES.most_s  # a prompt has at most two chunks before it
        assume(shape.tokens <= 512)
        assume(all(left_s(running) - later_s >= COST.seconds(shape) or left_s(running) < 0.0 for running in rt))
        found = {name for name, _ in ran(select(decodes, prompts, waiting, moment(Policy(scheduler)), 1000))}
        assert {running.request.id for running in urgent} <= found

    @given(
        crowds(),
        st.sampled_from(Late),
        st.sampled_from([SchedulerName.ALIGNED, SchedulerName.BROS, SchedulerName.SHORTEST]),
    )
    @some
    def test_prompts_that_wait_are_kept_in_the_order_in_which_all_are_ranked(
        self, crowd: tuple[list[WorkerRequest], ...], late: Late, scheduler: SchedulerName
    ) -> None:
        policy = Policy(scheduler, late=late)
        at = moment(policy)
        everybody = [running for some in crowd for running in some if not running.output]
        for running in everybody:
            running.prefix = 0
        waiting = waits(everybody, at)
        for now in (NOW, NOW + 0.7, NOW + 2.5):  # due times pass meanwhile
            waiting.refresh(now, TIMES, at.chunk)
            standings = [running.promise.standing(now, running.work(at.chunk), TIMES) for running in everybody]
            if rounding_decides(TIMES.most_s, *(standing.slack_s for standing in standings)):
                continue
            expected = [
                standing.id for standing in policy.ordering.sort(standings, lambda standing: standing, TIMES, late)
            ]
            assert [running.request.id for _, running in waiting.in_order(now, TIMES.most_s)] == expected
        for running in everybody[::2]:
            waiting.remove(running)
        kept = {running.request.id for running in everybody[1::2]}
        assert {running.request.id for _, running in waiting.in_order(NOW + 2.5, TIMES.most_s)} == kept
        assert waiting.num_tokens == sum(running.num_tokens for running in everybody[1::2])


def prompt_of(chunk: Chunk, crowd: tuple[list[WorkerRequest], ...]) -> Sequence[int]:
    return next(running.request.prompt for some in crowd for running in some if running.request.id == chunk.request)


def rounding_decides(*slacks_s: float) -> bool:
    """Whether rounding may decide which slack is less: slack is kept as an instant, and ranked as a duration."""
    return any(isclose(before, after, abs_tol=1e-9) for before, after in pairwise(sorted(slacks_s)))


def left_s(running: WorkerRequest) -> float:
    return running.promise.due_at(NOW) - NOW if running.promise.is_rt else inf


class TestTheNearest:
    @given(
        st.lists(st.tuples(lengths, st.booleans()), min_size=1, max_size=20), st.integers(1, 400), st.integers(0, 40)
    )
    def test_it_is_the_nearest_of_all(self, drawn: list[tuple[int, bool]], tokens: int, free: int) -> None:
        """The expected prompt is found by a search through all prompts; among equals the least slack goes first."""
        prompts = [chat(f"r{number}", 1.0, size) for number, (size, _) in enumerate(drawn)]
        for running, (size, is_seated) in zip(prompts, drawn, strict=True):
            running.kv = KvForm(tuple(range(-(-size // BLOCK))) if is_seated else ())
        at = moment()
        room = seating(free, at)
        left = Left(tokens, room.left_for(prompts[0]), 512, room.total * BLOCK)
        expected = []
        for number, running in enumerate(prompts):
            size = min(running.num_ahead, tokens)
            demand = room.demand(running, size)
            if demand <= room.left_for(prompts[0]):
                of_tokens, of_memory = (tokens - size) / 512, (left.memory - demand) / (room.total * BLOCK)
                expected.append((of_tokens * of_tokens + of_memory * of_memory, number, size))
        found = Window(prompts, room).take_nearest(left, may_cut=True, most_of=room.most)
        if not expected:
            assert found is None
        else:
            assert found is not None
            assert (prompts.index(found[0]), found[1]) == min(expected)[1:]

    def test_a_request_that_uses_most_of_both_goes_first(self) -> None:
        prompts = [chat("a", 0.8, 100), chat("b", 0.9, 300), chat("c", 1.0, 150)]
        assert ran(select([], [], prompts, moment(BEST_FIT, room=460), 100)) == [("b", 300), ("c", 150), ("a", 10)]

    def test_only_what_does_not_fit_whole_is_cut(self) -> None:
        prompts = [chat("a", 0.8, 100), chat("b", 0.9, 300)]
        assert ran(select([], [], prompts, moment(BEST_FIT, room=512), 100)) == [("b", 300), ("a", 100)]

    def test_beyond_the_window_slack_decides(self) -> None:
        prompts = [chat("a", 0.8, 100), chat("b", 1.8, 300)]
        assert ran(select([], [], prompts, moment(BEST_FIT, room=110), 100)) == [("a", 100), ("b", 10)]

    def test_documents_come_last(self) -> None:
        prompts = [document("d", 300), chat("a", 0.8, 100)]
        assert ran(select([], [], prompts, moment(BEST_FIT, room=110), 100)) == [("a", 100), ("d", 10)]

    def test_memory_may_make_the_smaller_chunk_the_nearest(self) -> None:
        """The large prompt does not fit; only an about equally urgent prompt overtakes it, none of a later window."""
        prompts = [chat("large", 0.8, 300), chat("near", 0.9, 30), chat("far", 2.5, 30)]
        found = select([], [], prompts, moment(BEST_FIT), 5)
        assert ran(found) == [("near", 30)]

    def test_a_prompt_that_is_too_long_for_the_tokens_left_is_overtaken_by_one_of_a_later_window(self) -> None:
        prompts = [chat("a", 0.8, 100), chat("b", 0.9, 150), chat("later", 2.5, 40)]
        policy = replace(BEST_FIT, chunking=Chunking.NONE)
        assert ran(select([], [], prompts, moment(policy, room=200), 100)) == [("b", 150), ("later", 40)]

    def test_memory_chunk_by_chunk_cuts_a_prompt(self) -> None:
        prompts = [chat("large", 0.8, 300)]
        assert ran(select([], [], prompts, moment(Policy(room=Room.CHUNKS)), 5)) == [("large", 5 * BLOCK)]

    def test_what_the_pool_says_of_a_seated_prompt_leaves_it_growing_by_chunks(self) -> None:
        late = chat("late", 0.8, 58)
        late.prefix, late.kv, late.known = 32, KvForm((0, 1)), (7,)
        assert ran(select([], [late], [], moment(Policy(room=Room.CHUNKS)), 5)) == [("late", 26)]
        assert len(late.blocks) == 4

    def test_windows_are_of_one_priority(self) -> None:
        a, b, c = chat("a", 1.0), chat("b", 1.0), chat("c", 1.0)
        assert [*windows([((0, 0.1), a), ((0, 0.8), b), ((1, 0.1), c)], 0.75)] == [[a, b], [c]]


def test_a_prompt_fetches_what_the_pool_has_though_the_step_has_no_time_for_its_tokens() -> None:
    """Only what is computed takes time of the step, and the copy is made by the next one."""
    at, blocks, fetched = moment(), NamedBlocks(100), document("fetched", 64)
    pages = DevicePages(blocks, BLOCK, BLOCK, lambda _prompt, _tokens: ())
    fetched.kv, fetched.known, waiting = NO_KV, (5, 6), WaitingPrompts(at.policy, pages)
    waiting.add(fetched)
    room = Seating(blocks, 100, BLOCK, 10, False, lambda running: running.num_tokens, pages)
    found = choose([chat("a", 0.0111, output=3)], [], waiting, at, room)
    assert ran(found) == [("a", 1)]
    assert found.admitted == [fetched]


def test_accelgen_runs_as_many_prompt_tokens_as_the_tightest_promise_allows() -> None:
    """A step of all 512 takes 62 ms of the second that the chat leaves."""
    decodes, prompts = [chat("a", 0.9, output=3)], [document("d", prompt=400)]
    assert ran(select(decodes, prompts, [], moment(Policy(SchedulerName.ACCELGEN)))) == [("a", 1), ("d", 400)]


class TestLongPrompts:
    LONG = PaperPolicy(SchedulerName.ACCELGEN, long_prompt=200)

    def test_one_at_a_time(self) -> None:
        prompts = [chat("a", 0.8, 250), chat("b", 0.8, 240), chat("c", 0.8, 30)]
        assert dict(ran(select([], [], prompts, moment(self.LONG), 100))) == {"a": 250, "c": 30}

    def test_no_prompt_starts_before_the_running_prompt_is_through(self) -> None:
        runs = chat("runs", 0.8, 250)
        runs.prefix = 240
        assert ran(select([], [runs], [chat("b", 0.8, 240)], moment(self.LONG), 100)) == [("runs", 10)]

    def test_unless_it_is_urgent(self) -> None:
        runs = chat("runs", 0.8, 250)
        runs.prefix = 240
        found = select([], [runs], [chat("b", 0.0395, 240)], moment(self.LONG), 100)
        assert dict(ran(found)) == {"b": 240, "runs": 10}

    def test_short_prompts_wait_for_no_long_one(self) -> None:
        found = select([], [chat("begun", 0.8, 240)], [document("short")], moment(self.LONG), 100)
        assert "short" in dict(ran(found))

    def test_the_default_lets_long_prompts_run_together(self) -> None:
        at = moment(replace(self.LONG, scheduler=SchedulerName.ALIGNED))
        found = select([], [document("begun", 240)], [document("d", 240)], at, 100)
        assert dict(ran(found)).keys() == {"begun", "d"}

    def test_several_with_a_fixed_budget(self) -> None:
        prompts = [chat("a", 0.8, 250), chat("b", 0.8, 240)]
        fixed = replace(self.LONG, chunking=Chunking.FIXED)
        assert dict(ran(select([], [], prompts, moment(fixed), 100))) == {"a": 250, "b": 240}


class TestTheBudget:
    def test_four_times_what_saturates_the_hardware(self) -> None:
        """A step takes the same time for up to 64 tokens, as the weights have to be read anyway."""
        cost = CostModel({kind: Coefficients(fixed=0.01, token=(0.0,) * 6 + (1e-3,)) for kind in Kind})
        assert cost.pivot(2048) == 64
        at = replace(moment(Policy(), room=2048), cost=cost, pivot=cost.pivot(2048))
        assert ran(select([], [], [document("d", 2000)], at, 1000)) == [("d", 256)]

    def test_a_fixed_chunk_asks_for_no_deadline(self) -> None:
        fixed = Policy(chunking=Chunking.FIXED)
        found = select([chat("a", 0.02, output=3)], [document("d", 400)], [], moment(fixed, room=301))
        assert ran(found) == [("a", 1), ("d", 300)]

    def test_whole_prompts_run_alone(self) -> None:
        none = Policy(chunking=Chunking.NONE)
        decodes, prompts = [chat("a", 0.9, output=3)], [chat("b", 0.8, 300), chat("c", 0.9, 300)]
        assert ran(select(decodes, [], prompts, moment(none), 100)) == [("b", 300)]
        assert ran(select(decodes, [], [chat("longer", 0.8, 600)], moment(none), 100)) == [("longer", 512)]
        assert ran(select(decodes, [], [], moment(none))) == [("a", 1)]

    def test_in_the_paper_it_is_the_pivot_times_the_tightest_allowance(self) -> None:
        """A step of S_pf = 512 takes 61.2 ms; a gap of 20 ms leaves a third of it, less the decode."""
        paper = Policy(SchedulerName.ACCELGEN_NO_BATCH, room=Room.CHUNKS)
        tight = chat("a", 0.9, output=3)
        tight.request = replace(tight.request, slo=replace(tight.request.slo, tbt_s=0.02))
        at = moment(paper)
        assert at.pivot == 512
        found = select([tight], [document("d", 400)], [], at, 100)
        assert ran(found) == [("a", 1), ("d", int(512 * 0.02 / 0.0612) - 1)]


@pytest.mark.parametrize("policy", [Policy(), BEST_FIT, Policy(SchedulerName.FCFS), Policy(chunking=Chunking.FIXED)])
def test_nobody_starves_under_overload(policy: Policy) -> None:
    """One large prompt waits among ever new small prompts, which need twice as much memory as there is."""
    blocks, waiting, now = Blocks(64), WaitingPrompts(policy), NOW
    large = chat("large", 1.0, prompt=640)  # 40 blocks
    large.kv = KvForm()
    holding: list[tuple[float, WorkerRequest]] = []
    waiting.add(large)
    for step in range(3000):
        now += 0.02
        for number in range(4):
            small = chat(f"s{step}.{number}", now - NOW + 1.0, prompt=64)
            small.kv = KvForm()
            waiting.add(small)
        for until, running in [*holding]:
            if until <= now:
                holding.remove((until, running))
                blocks.give(running.blocks)
        prompts = [running for _, running in holding if running.num_ahead]
        found = chosen(prompts, waiting, blocks, policy, now)
        for running in found.admitted:
            waiting.remove(running)
            holding.append((now + 0.2, running))
        if large in found.admitted:
            return
    pytest.fail("the large prompt never got a seat")


def chosen(
    prompts: Sequence[WorkerRequest], waiting: WaitingPrompts, blocks: Blocks, policy: Policy, now: float
) -> PlannedStep:
    at = replace(moment(policy), now=now, times=StepTimes(0.02, 0.03))
    room = Seating(blocks, 64, BLOCK, 1000, False, lambda running: running.num_tokens)
    found = choose((), prompts, waiting, at, room)
    for running in (*prompts, *found.admitted):
        running.prefix += sum(len(chunk.tokens) for chunk in found.chunks if chunk.request == running.request.id)
    return found


class TestWhatMeansNothing:
    @pytest.mark.parametrize(
        "policy",
        [
            Policy(SchedulerName.MLFQ),
            Policy(SchedulerName.SHORTEST, memory="hybrid"),
            Policy(chunking=Chunking.NONE, room=Room.CHUNKS),
            PaperPolicy(waiting_ratio=1.2),
        ],
    )
    def test_it_has_a_reason(self, policy: Policy) -> None:
        assert policy.problem is not None
        assert "\n" not in policy.problem
