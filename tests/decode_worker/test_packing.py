"""Seated requests that run or leave, for each way of packing, on a worker that runs prompts too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.core import KvForm, Request, ServiceClass, Slo, StepPlan, StepResult, WorkerLimits
from alignedserve.cost.fit import OnlineCost
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.lab.fuzzing.worker_views import kept_blocks, num_preemptions
from alignedserve.papers.fcfs import RoundRobin
from alignedserve.papers.names import SchedulerName
from alignedserve.protocol.commands import Command, RunStep
from alignedserve.protocol.events import Received, StepDone
from alignedserve.protocol.messages import ROUTER, Prefill
from alignedserve.schedulers.aligned import Aligned
from alignedserve.schedulers.table import scheduler_of
from alignedserve.scheduling.dues import promise
from alignedserve.scheduling.policy import Chunking, Policy, Room
from alignedserve.scheduling.slo import Late
from alignedserve.worker.candidates import RunningBatch
from alignedserve.worker.scheduler import Scheduler
from alignedserve.worker.setup import WorkerSetup
from alignedserve.worker.step.context import StepContext
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.seating import RecentNeed
from alignedserve.worker.step.step_builder import StepBuilder
from alignedserve.worker.step.view import PlannedStep, RanStep, StepView
from tests.conftest import examples
from tests.samples import request
from tests.worker.step.test_selection import NOW, TIMES, chat, document, moment, seating, select, waits

RT, BE = ServiceClass.RT, ServiceClass.BE
PLAIN = Policy(SchedulerName.FCFS, Chunking.FIXED, Room.GROWING, reuse=False)
ROUND = replace(PLAIN, scheduler=SchedulerName.ROUND_ROBIN)
MLFQ = replace(PLAIN, scheduler=SchedulerName.MLFQ)
KNAPSACK = replace(PLAIN, scheduler=SchedulerName.APT_SERVE, chunking=Chunking.NONE, memory="weighed")
LIMITS = WorkerLimits(num_blocks=16, block_size=4, page_size=8, max_step_tokens=64, max_batch=4)
LARGE = WorkerLimits(num_blocks=16, block_size=16, page_size=16, max_step_tokens=256, max_batch=4)


def make_request(name: str, service: ServiceClass, prompt: int = 4, tokens: int = 8, at: float = 0.0) -> Request:
    new_request = request(name, prompt=prompt, max_tokens=tokens)
    return replace(new_request, service=service, slo=Slo(ttft_s=1.0, tbt_s=0.2, jct_s=1000.0), arrival_at=at)


def each_of(view: StepView) -> list[WorkerRequest]:
    return [*view.decodes, *view.prompts, *view.waiting]


class ChatsFirst(Scheduler):
    def plan(self, view: StepView) -> PlannedStep:
        chats = [running for running in each_of(view) if running.promise.is_rt]
        return self.step_of(view, chats or each_of(view))


class NoDocumentsBesideChats(Aligned):
    def documents_budget(self, step: StepBuilder) -> int:
        return 0


class FewestFirst(Scheduler):
    def plan(self, view: StepView) -> PlannedStep:
        return self.step_of(view, sorted(each_of(view), key=lambda running: running.prefix))


class FirstLeaves(Scheduler):
    def plan(self, view: StepView) -> PlannedStep:
        return self.step_of(view, each_of(view))

    def leaving(
        self, prompts: Sequence[WorkerRequest], decodes: Sequence[WorkerRequest], at: StepContext
    ) -> WorkerRequest:
        return next(running for running in decodes if running.request.id == "first")


def own(scheduler: type[Scheduler], room: Room = Room.GROWING) -> Policy:
    return Policy(f"{__name__}:{scheduler.__name__}", room=room, reuse=False)


class Device:
    """Run a worker whose engine always samples token 7; each step takes the time that the test sets."""

    def __init__(
        self, policy: Policy, limits: WorkerLimits = LIMITS, step_s: float = 0.01, cost: OnlineCost | None = None
    ) -> None:
        self.worker = decode_core(WorkerSetup(limits, policy, cost))
        self.now, self._step_s = 0.0, step_s
        self.plans: list[StepPlan] = []
        self.said: Counter[str] = Counter()
        self.said_at: dict[str, list[float]] = {}

    def ask(self, *requests: Request) -> None:
        for new_request in requests:
            self._take(self.worker.handle(Received(ROUTER, Prefill(new_request)), self.now))

    def _take(self, commands: Iterable[Command]) -> None:
        self.plans += [command.plan for command in commands if isinstance(command, RunStep)]

    @property
    def plan(self) -> StepPlan | None:
        """Return the plan that runs now, if there is one."""
        return self.plans[-1] if self.plans and self.plans[-1].number == self._next else None

    _next = 1

    def step(self) -> StepPlan:
        plan = self.plan
        assert plan is not None, "nothing runs"
        self.now += self._step_s
        self._next += 1
        names = [
            *(chunk.request for chunk in plan.chunks if chunk.sampling is not None),
            *(d.request for d in plan.decodes),
        ]
        for name in names:
            self.said[name] += 1
            self.said_at.setdefault(name, []).append(self.now)
        result = StepResult(plan.number, tuple((name, 7) for name in names))
        self._take(self.worker.handle(StepDone(result, self._step_s), self.now))
        return plan

    def run(self, most: int = 2000) -> None:
        for _ in range(most):
            if self.plan is None:
                return
            self.step()
        raise AssertionError("it never ends")


def parts(plan: StepPlan) -> list[str]:
    return sorted({part.request for part in plan.parts})


class TestOwnScheduler:
    def test_it_says_which_requests_run(self) -> None:
        device = Device(own(ChatsFirst))
        device.ask(make_request("d", BE, tokens=20), make_request("c", RT, tokens=9))
        device.run()
        assert [parts(plan) for plan in device.plans[:4]] == [["d"], ["c"], ["c"], ["c"]]
        assert device.said == {"d": 20, "c": 9}
        assert max(device.said_at["c"]) < device.said_at["d"][1]

    def test_it_may_be_the_default_with_one_piece_changed(self) -> None:
        device = Device(own(NoDocumentsBesideChats))
        device.ask(make_request("c", RT, tokens=9), make_request("d", BE, tokens=3))
        device.run()
        assert max(device.said_at["c"]) < device.said_at["d"][0], "no prompt of a document runs beside chats"

    @pytest.mark.parametrize("service", ServiceClass)
    def test_of_prompts_that_take_all_memory_by_turns_one_waits_until_another_has_ended(
        self, service: ServiceClass
    ) -> None:
        """Each has half of the blocks, and needs more. One that left and got a seat at once would take them again."""
        device = Device(own(FewestFirst, Room.CHUNKS), replace(LIMITS, max_step_tokens=16))
        device.ask(make_request("a", service, 48, tokens=2), make_request("b", service, 48, tokens=2))
        device.run()
        order = [name for plan in device.plans for name in parts(plan)]
        assert order == [*"abab", *"aa", *"bbbb"]
        assert num_preemptions(device.worker) == 1

    def test_it_says_who_leaves_where_memory_is_short(self) -> None:
        device = Device(own(FirstLeaves), replace(LIMITS, num_blocks=8))
        device.ask(make_request("first", BE, tokens=20), make_request("second", BE, tokens=20))
        device.run()
        assert device.said_at["second"][-1] < device.said_at["first"][-1]


class TestRoundRobin:
    def test_classes_take_turns(self) -> None:
        device = Device(ROUND)
        device.ask(make_request("d", BE), make_request("c", RT), make_request("e", BE))
        device.run()
        # The document was there first; a class without requests passes its turn.
        assert [parts(plan) for plan in device.plans[:6]] == [["d"], ["c"], ["d", "e"], ["c"], ["d", "e"], ["c"]]
        assert device.said == {"d": 8, "c": 8, "e": 8}

    def test_alone_a_class_runs_at_every_step(self) -> None:
        device = Device(ROUND)
        device.ask(make_request("d", BE))
        device.run()
        assert len(device.plans) == 8

    @given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=30))
    def test_nobody_runs_twice_while_the_other_waits(self, there: list[tuple[bool, bool]]) -> None:
        turns, last, ran = RoundRobin(ROUND, 8), None, RanStep()
        for has_rt, has_be in there:
            decodes = [chat("c", 1.0, output=3)] * has_rt + [document("d", output=3)] * has_be
            at_once = moment(ROUND)
            view = StepView(decodes, (), waits((), at_once), at_once, seating(0, at_once), ran=ran)
            chosen = turns.plan(view).decodes
            assert bool(chosen) is (has_rt or has_be)
            if chosen:
                is_rt = chosen[0].promise.is_rt
                assert not (has_rt and has_be and last is is_rt)
                last = is_rt
                ran = RanStep(ran.number + 1, chosen)


class TestLongest:
    """AlignedServe's own rule (§3.4, case 3): the longest request leaves, where otherwise the newest leaves."""

    @pytest.mark.parametrize(("scheduler", "first"), [(SchedulerName.LONGEST, "short"), (SchedulerName.FCFS, "long")])
    def test_the_longest_leaves_for_want_of_memory(self, scheduler: SchedulerName, first: str) -> None:
        device = Device(replace(PLAIN, scheduler=scheduler), replace(LIMITS, num_blocks=8))
        device.ask(make_request("long", BE, prompt=20), make_request("short", BE))
        device.run()
        assert num_preemptions(device.worker) == 1
        assert min(device.said_at, key=lambda name: device.said_at[name][-1]) == first
        assert device.said == {"long": 8, "short": 8}

    def test_of_the_old_batch_while_another_takes_its_place(self) -> None:
        batch, (old, new, longest) = (
            RunningBatch(),
            (document(name, size) for name, size in zip("onl", (4, 6, 9), strict=True)),
        )
        batch.comes([4, 4])
        batch.comes([6, 9])
        batch.begins(2)
        old.batch, new.batch, longest.batch = 1, 2, 2
        leaves = scheduler_of(replace(PLAIN, scheduler=SchedulerName.LONGEST), 8).leaving
        at = replace(moment(), newest_batch=batch.number)
        assert leaves((), (longest, old, new), at) is old
        assert leaves((), (longest, new), at) is longest

    @pytest.mark.parametrize(("prefix", "tag"), [(720, 1), (721, 0)])
    def test_a_batch_of_one_length_has_a_band_all_the_same(self, prefix: int, tag: int) -> None:
        """A spread of 256 tokens costs a step next to nothing. Members may have grown by 64."""
        batch, member = RunningBatch(), document("member", 400, output=1)
        batch.comes([400])
        batch.begins(1)
        member.batch = 1
        assert batch.band([member]) == (400, 656)
        assert batch.tag(prefix, [member]) == tag

    @pytest.mark.parametrize(("prefix", "tag"), [(464, 1), (465, 0), (36, 1), (35, 0)])
    def test_members_are_in_the_band_of_their_batch_and_what_it_may_have_grown(self, prefix: int, tag: int) -> None:
        batch, member = RunningBatch(), document("member", 400)
        batch.comes([100, 400])  # 300 tokens wide, and 64 by which members may have grown
        batch.begins(1)
        member.prefix, member.batch = (100 if prefix > 100 else 400), 1
        assert batch.tag(prefix, [member]) == tag


class TestSwapping:
    """ALISE's own rule (Algorithm 2): requests of lower levels leave for requests of higher ones."""

    POLICY = replace(PLAIN, scheduler=SchedulerName.ALISE)
    ROOM = replace(LIMITS, num_blocks=40)  # 160 tokens

    def device(self, *requests: Request, **changed: Any) -> Device:
        """Return a worker on which these requests decode."""
        device = Device(replace(self.POLICY, **changed), self.ROOM)
        device.ask(*requests)
        while len(device.said) < len(requests):
            device.step()
        return device

    @pytest.mark.parametrize(("scheduler", "left"), [(SchedulerName.ALISE, 1), (SchedulerName.SHORTEST, 0)])
    def test_a_request_of_a_lower_level_leaves_for_one_of_a_higher_level(
        self, scheduler: SchedulerName, left: int
    ) -> None:
        device = self.device(make_request("long", RT, prompt=100, tokens=50), scheduler=scheduler)
        device.ask(make_request("short", BE, prompt=80))
        device.run()
        assert num_preemptions(device.worker) == left
        assert (device.said_at["short"][-1] < device.said_at["long"][-1]) is bool(left)
        assert device.said == {"long": 50, "short": 8}

    def test_requests_of_one_level_take_nothing_from_each_other(self) -> None:
        device = self.device(make_request("first", BE, prompt=100, tokens=60))
        device.ask(make_request("shorter", RT, prompt=80, tokens=40))
        device.run()
        assert num_preemptions(device.worker) == 0

    def test_a_request_stays_where_its_memory_would_not_be_enough(self) -> None:
        device = self.device(make_request("long", BE, tokens=44), make_request("short", BE, prompt=92, tokens=20))
        device.ask(make_request("new", RT, prompt=70, tokens=4))
        device.run()
        assert num_preemptions(device.worker) == 0

    def test_the_one_with_the_longest_expected_wait_leaves(self) -> None:
        longest, shorter = make_request("longest", BE, prompt=40, tokens=100), make_request("shorter", RT, 60, 40)
        device = self.device(longest, shorter)
        device.ask(make_request("new", RT, prompt=70, tokens=4))
        while not device.said["new"]:
            device.step()
        assert {*device.worker.here.residents} == {"new", "shorter"}


def test_a_new_request_takes_the_memory_of_one_that_was_served_longer() -> None:
    """FastServe §4.2: all memory is reserved at once."""
    policy = replace(PLAIN, scheduler=SchedulerName.FASTSERVE, room=Room.WHOLE)
    device = Device(policy, replace(LIMITS, num_blocks=20))
    device.ask(make_request("old", BE, tokens=60))
    for _ in range(40):
        device.step()
    device.ask(make_request("new", RT, tokens=30))
    device.run()
    assert num_preemptions(device.worker) == 1
    assert device.said_at["new"][-1] < device.said_at["old"][-1]
    assert device.said == {"old": 60, "new": 30}


def test_prompts_that_have_each_some_memory_and_none_enough_take_turns() -> None:
    """They get their blocks chunk by chunk, and the second is more urgent than the first."""
    device = Device(Policy(room=Room.CHUNKS, reuse=False), replace(LIMITS, max_step_tokens=16))
    device.ask(make_request("calm", RT, prompt=56))
    device.step()
    device.ask(replace(make_request("urgent", RT, prompt=56), slo=Slo(ttft_s=0.1)))
    device.run()
    assert device.said == {"calm": 8, "urgent": 8}


def test_what_no_layer_reads_any_more_is_free_for_the_next_tokens() -> None:
    device = Device(Policy(), replace(LIMITS, num_blocks=6, reach=8))
    device.ask(make_request("long", RT, tokens=60))
    device.run()
    assert device.said == {"long": 60}


class TestLevels:
    def test_a_request_that_was_served_least_runs_first(self) -> None:
        device = Device(MLFQ, replace(LIMITS, max_batch=1, num_blocks=64))
        device.ask(make_request("old", BE, tokens=60))
        for _ in range(33):
            device.step()
        device.ask(make_request("new", RT, tokens=40))
        device.step()
        assert {name for plan in device.plans[34:60] for name in parts(plan)} == {"new"}
        device.run()
        assert device.said == {"old": 60, "new": 40}

    def test_the_most_served_request_leaves_for_want_of_memory(self) -> None:
        device = Device(MLFQ, replace(LIMITS, num_blocks=20))
        device.ask(make_request("old", BE, tokens=60))
        for _ in range(40):
            device.step()
        device.ask(make_request("new", RT, tokens=60))
        device.run()
        assert num_preemptions(device.worker) > 0
        assert device.said == {"old": 60, "new": 60}


class TestKnapsack:
    """Apt-Serve: which requests hold memory is decided before each step."""

    @pytest.mark.parametrize("chunking", [Chunking.NONE, Chunking.FIXED])
    def test_a_step_is_of_one_type_where_prompts_are_whole(self, chunking: Chunking) -> None:
        device = Device(replace(KNAPSACK, chunking=chunking), replace(LIMITS, num_blocks=64, max_batch=8))
        device.ask(make_request("a", RT, tokens=20))
        device.step()
        device.ask(*(make_request(name, RT, at=device.now) for name in "bcd"))
        device.run()
        is_mixed = any(plan.chunks and plan.decodes for plan in device.plans)
        assert is_mixed is (chunking is Chunking.FIXED)
        assert device.said == {"a": 20, "b": 8, "c": 8, "d": 8}

    def test_the_next_step_is_of_those_that_have_been_pending_longer_in_all(self) -> None:
        """Two decodes wait for one prompt; when it is through, they have waited longer than the next prompt."""
        device = Device(KNAPSACK, replace(LIMITS, num_blocks=64))
        device.ask(make_request("a", RT, tokens=20), make_request("b", RT, tokens=20))
        for _ in range(3):
            device.step()
        device.ask(make_request("c", RT, at=device.now))
        while parts(device.plans[-1]) != ["c"]:
            device.step()
        device.ask(make_request("d", RT, at=device.now))
        device.step()
        device.step()
        assert [parts(plan) for plan in device.plans[-2:]] == [["a", "b", "c"], ["d"]]

    def test_memory_goes_to_the_request_that_is_pending_longest_for_the_least_of_it(self) -> None:
        device = Device(KNAPSACK, replace(LIMITS, num_blocks=12))
        device.ask(make_request("a", RT, prompt=40, tokens=4))
        device.ask(make_request("large", RT, prompt=46, tokens=2), make_request("small", RT, prompt=4))
        device.run()
        first = {name: at[0] for name, at in device.said_at.items()}
        assert first["small"] < first["large"]
        assert device.said == {"a": 4, "large": 2, "small": 8}

    def test_a_request_that_is_worth_least_is_computed_anew_where_decodes_lack_memory(self) -> None:
        device = Device(KNAPSACK, replace(LIMITS, num_blocks=9))
        device.ask(make_request("a", RT, prompt=8, tokens=16), make_request("b", RT, prompt=8, tokens=16))
        device.run()
        assert num_preemptions(device.worker) > 0
        assert device.said == {"a": 16, "b": 16}
        assert device.worker.held["blocks"] == 0

    def test_a_request_that_is_late_goes_behind_where_such_are_dropped(self) -> None:
        device = Device(replace(KNAPSACK, late=Late.DROP_LAST), replace(LIMITS, num_blocks=12))
        device.ask(make_request("a", RT, prompt=40, tokens=4))
        device.ask(make_request("late", RT, prompt=4, at=-5.0), make_request("new", RT, prompt=36))
        device.run()
        assert device.said_at["new"][0] < device.said_at["late"][-1]
        assert device.said == {"a": 4, "late": 8, "new": 8}


class TestRealTimeFirst:
    @pytest.mark.parametrize("room", [*Room])
    def test_a_chat_gets_the_memory_of_a_document(self, room: Room) -> None:
        device = Device(Policy(room=room, reuse=False), replace(LIMITS, num_blocks=12))
        device.ask(make_request("d", BE, prompt=20, tokens=20))
        device.step()
        device.ask(make_request("c", RT, prompt=24, tokens=20, at=0.01))
        device.run()
        assert num_preemptions(device.worker) > 0
        assert device.said == {"d": 20, "c": 20}
        assert device.said_at["c"][-1] < device.said_at["d"][-1]
        assert device.worker.held["blocks"] == 0
        assert not {*kept_blocks(device.worker)}, "nothing is reused"

    def test_a_document_gets_nobodys(self) -> None:
        device = Device(Policy(reuse=False, room=Room.WHOLE), replace(LIMITS, num_blocks=12))
        device.ask(make_request("c", RT, prompt=20, tokens=20), make_request("d", BE, prompt=20, tokens=20))
        device.run()
        assert num_preemptions(device.worker) == 0
        assert device.said_at["c"][-1] <= device.said_at["d"][0]

    def test_a_chat_gets_a_seat_where_documents_have_all(self) -> None:
        device = Device(Policy(reuse=False), replace(LIMITS, num_blocks=64))
        device.ask(*(make_request(f"d{number}", BE, tokens=30) for number in range(4)))
        device.step()
        device.ask(make_request("c", RT, at=0.01))
        for _ in range(3):
            device.step()
        assert device.said["c"] >= 1, "it has its first token long before a document ends"
        assert all(len(plan.parts) <= 4 for plan in device.plans)
        assert num_preemptions(device.worker) == 0, "there is memory for all: who does not run is paused"
        device.run()
        assert set(device.said.values()) == {30, 8}

    def test_documents_leave_free_what_chats_needed_lately(self) -> None:
        lately = RecentNeed()
        assert lately.spare_blocks(40, now=0.0) == 0
        assert lately.spare_blocks(10, now=30.0) == 10
        assert lately.spare_blocks(10, now=1000.0) == 0

    def test_documents_take_what_chats_needed_once_none_is_expected(self) -> None:
        device = Device(Policy(reuse=False), LARGE, step_s=0.1)
        for number in range(19):
            device.ask(make_request(f"c{number}", RT, tokens=1, at=device.now))
            device.run()
        device.ask(make_request("d0", BE, tokens=200, at=device.now))
        device.ask(make_request("long", RT, prompt=170, tokens=10, at=device.now))
        last = device.now
        device.step()
        device.ask(make_request("d1", BE, prompt=130, at=last))
        device.run()
        begun_s = device.said_at["d1"][0] - last
        assert 9.5 < begun_s < 11, "20 chats came within seconds: for 10 s more are expected, and then none"

    def test_the_first_document_waits_for_nothing(self) -> None:
        """However much chats needed lately, a document may use all free memory where no other request is seated."""
        device = Device(Policy(reuse=False, room=Room.WHOLE), replace(LIMITS, num_blocks=12))
        device.ask(make_request("c", RT, prompt=40, tokens=4))
        device.run()
        device.ask(make_request("d", BE, prompt=40, tokens=4, at=device.now))
        device.run()
        assert device.said == {"c": 4, "d": 4}


class TestTheSizeOfAStep:
    def test_requests_that_do_not_fit_are_paused(self) -> None:
        decodes = [chat("c", 0.9, output=3), *(document(f"d{number}", output=3) for number in range(5))]
        assert len(select(decodes, [], [], moment(), most=3).decodes) == 3


crowds = st.lists(
    st.one_of(
        st.builds(chat, st.just(""), st.floats(0.05, 1.0), st.integers(1, 100), st.just(3)),
        st.builds(document, st.just(""), st.integers(1, 100), st.just(3), st.floats(0.01, 1000)),
    ),
    min_size=1,
    max_size=20,
)


@given(crowds, st.integers(1, 20))
@settings(deadline=None)
def test_documents_make_no_chat_late_and_a_step_is_never_empty(crowd: list[WorkerRequest], batch: int) -> None:
    """Every chat that could run is in this step or, by the cost model, has time for this step and its own after it."""
    for number, running in enumerate(crowd):
        running.request = running.promise.request = replace(running.request, id=f"r{number}")
    found = select(crowd, [], [], moment(), most=batch)
    names = {decode.request.id for decode in found.decodes}
    assert 1 <= len(names) <= batch
    runs_be = any(not decode.promise.is_rt for decode in found.decodes)
    for running in crowd:
        if running.promise.is_rt and runs_be and len(names) > 1:
            left_s = running.promise.due_at(NOW) - NOW
            assert found.predicted_s <= left_s
            if running.request.id not in names and len([o for o in crowd if o.promise.is_rt]) <= batch:
                assert left_s - found.predicted_s >= TIMES.mean_s - 1e-9


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 24), st.integers(1, 24), st.integers(0, 40)), max_size=10),
    st.sampled_from([PLAIN, ROUND, MLFQ, Policy(reuse=False), Policy(room=Room.GROWING, reuse=False)]),
    st.integers(12, 30),
    st.integers(1, 4),
)
@settings(max_examples=examples(30), deadline=None)
def test_everybody_ends_however_they_are_packed(
    asked: list[tuple[bool, int, int, int]], policy: Policy, blocks: int, batch: int
) -> None:
    """The set of requests is closed: no new requests arrive for ever, so no request waits for ever."""
    device = Device(policy, replace(LIMITS, num_blocks=blocks, max_batch=batch))
    wanted = {}
    for number, (is_rt, prompt, tokens, after) in enumerate(asked):
        for _ in range(after):
            if device.plan is not None:
                device.step()
        name = f"r{number}"
        wanted[name] = tokens
        device.ask(make_request(name, RT if is_rt else BE, prompt, tokens, at=device.now))
        assert device.plan is not None, "a step is never empty while anything can run"
    device.run()
    assert device.said == wanted
    assert device.worker.held["blocks"] == 0
    assert all(len({part.request for part in plan.parts}) <= batch for plan in device.plans)


def test_a_long_document_is_served_among_endless_short_documents() -> None:
    """The document rises a level for each age that it waits; a step has one place."""
    policy = Policy(expected_output=1000, age_s=1.0)
    scheduler, served_at, now = scheduler_of(policy, most=1), [NOW], NOW

    def short(number: int) -> WorkerRequest:
        return documents(f"short{number}", most=20)

    def documents(name: str, most: int) -> WorkerRequest:
        new_request = replace(request(name, prompt=8, max_tokens=most), service=BE, slo=Slo(jct_s=1e6), arrival_at=now)
        return WorkerRequest(new_request, promise(new_request, policy, 1), [7], KvForm((0,)), 8)

    decodes = [documents("long", most=900), short(0)]
    for number in range(1, 600):
        at = replace(moment(policy), now=now)
        [running] = scheduler.plan(StepView(decodes, (), waits((), at), at, seating(0, at))).decodes
        now += 0.05
        running.output.append(7)
        running.prefix += 1
        running.promise.emitted(now, len(running.output))
        if running is decodes[0]:
            served_at.append(now)
        elif len(running.output) == 20:
            decodes[1] = short(number)
    assert len(served_at) > 5
    gaps = [later - earlier for earlier, later in pairwise(served_at)]
    assert max(gaps) <= 2 * policy.age_s, "it has begun: it goes before all others after its first age"


def test_a_document_that_gave_its_memory_to_a_chat_goes_on_before_short_documents_begin() -> None:
    """A short document comes at every step: each would fit into the memory that the chat gives back."""
    device = Device(Policy(reuse=False, refuse_ttfts=0.0))
    device.ask(make_request("long", BE, prompt=24, tokens=16))
    for _ in range(4):
        device.step()
    device.ask(make_request("chat", RT, prompt=40, tokens=8, at=device.now))
    for number in range(200):
        device.ask(make_request(f"short{number}", BE, prompt=4, tokens=4, at=device.now))
        device.step()
    assert device.said["long"] == 16
    gaps = [after - before for before, after in pairwise(device.said_at["long"])]
    chat_s = device.said_at["chat"][-1] - device.said_at["chat"][0]
    assert chat_s <= max(gaps) <= 2 * chat_s, "it left for the chat, and came back soon after"
