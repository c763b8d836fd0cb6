"""An order that is kept between steps is the order that would be recomputed at each step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from alignedserve.core import Estimate
from alignedserve.cost.model import Coefficients, CostModel, Kind
from alignedserve.schedulers.aligned import Aligned, step_bounds
from alignedserve.scheduling.dues import promise
from alignedserve.scheduling.policy import Policy
from alignedserve.scheduling.slo import Late, Rank, Standing, StepTimes, in_order
from alignedserve.worker.scheduler import NO_LIMIT
from alignedserve.worker.step.context import StepContext
from alignedserve.worker.step.ranks import DecodeOrder, RankedRequests
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.view import StepView
from alignedserve.worker.step.waiting_prompts import Ranked, WaitingPrompts
from tests.calls import calls_of
from tests.conftest import examples
from tests.worker.step.test_selection import NOW, chat, document, moment, seating

ROUNDING_S = 1e-9
COST = CostModel({kind: Coefficients(fixed=0.01, decode=1e-4, prefix=1e-5) for kind in Kind})
TIMES = (StepTimes(0.01, 0.02), StepTimes(0.02, 0.05))


class Kept(RuleBasedStateMachine):
    @initialize(late=st.sampled_from(Late))
    def start(self, late: Late) -> None:
        self.policy = Policy(late=late, age_s=0.5)
        self.seated, self.decodes, self.number = DecodeOrder(self.policy), list[WorkerRequest](), 0
        self.now, self.times = NOW, TIMES[0]

    def _join(self, running: WorkerRequest) -> None:
        self.number += 1
        running.request = replace(running.request, id=f"r{self.number}")
        running.promise = promise(running.request, self.policy, len(running.output))
        self.decodes.append(running)

    @rule(left_s=st.floats(-0.5, 1.0), priority=st.sampled_from((0, 0, 1)))
    def a_chat_joins(self, left_s: float, priority: int) -> None:
        self._join(chat("", left_s, output=3, priority=priority))

    @rule(jct_s=st.floats(0.1, 200.0), prompt=st.integers(1, 50))
    def a_document_joins(self, jct_s: float, prompt: int) -> None:
        self._join(document("", prompt, output=3, jct_s=jct_s))

    @rule(data=st.data())
    def one_leaves(self, data: st.DataObject) -> None:
        if self.decodes:
            self.decodes.pop(data.draw(st.integers(0, len(self.decodes) - 1)))

    @rule(data=st.data(), after_s=st.floats(0.0, 0.3), fails=st.booleans())
    def a_step_runs(self, data: st.DataObject, after_s: float, fails: bool) -> None:
        ran = [running for running in self.decodes if data.draw(st.booleans())]
        self.seated.note_run(ran)
        self.now += after_s
        for running in ran if not fails else ():
            running.output.append(7)
            running.prefix += 1
            running.promise.emitted(self.now, len(running.output))

    @rule(times=st.sampled_from(TIMES))
    def steps_take_longer(self, times: StepTimes) -> None:
        self.times = times

    @rule()
    def others_choose(self) -> None:
        self.seated.forget()

    @rule(after_s=st.floats(0.0, 2.0))
    def time_passes(self, after_s: float) -> None:
        self.now += after_s

    @invariant()
    def the_order_is_the_one_made_anew(self) -> None:
        self.seated.refresh(self.decodes, NO_LIMIT, self.now, self.times)
        standings = [running.promise.standing(self.now, running.work(1), self.times) for running in self.decodes]
        if any(abs(standing.slack_s - self.times.most_s) < ROUNDING_S for standing in standings):
            return  # slack is kept as an instant: within the rounding error a request may count as urgent or not
        kept, named = [key[-1] for key, _ in self.ranked()], {standing.id: standing for standing in standings}
        assert sorted(kept) == sorted(named)
        anew = in_order(standings, self.times, self.policy.late)
        assert [self._place(named[id]) for id in kept] == list(map(self._place, anew))
        for key, running in self.ranked():
            standing = running.promise.standing(self.now, running.work(1), self.times)
            assert key[0] == standing.rank(self.times, self.policy.late)

    def _place(self, standing: Standing) -> tuple[float, ...]:
        """Return the request's place, without the tie-break among equal slacks, which rounding decides."""
        key = standing.key(self.times, self.policy.late)
        return tuple(round(part, 6) for part in (key if key[0] is Rank.BE else key[:-1]))

    @invariant()
    def the_bound_is_the_one_of_all(self) -> None:
        """Check the step's bound against the bound over all requests; late requests that are dropped bind nothing."""
        self.seated.refresh(self.decodes, NO_LIMIT, self.now, self.times)
        at = StepContext(self.now, COST, self.times, 2048, 16, 256, self.policy, 256)
        dropped = self.policy.late is Late.DROP_LAST
        real_time = [running for running in self.decodes if running.promise.is_rt]
        counted = [running for running in real_time if not (dropped and running.promise.is_late(self.now))]
        view = StepView(self.decodes, (), WaitingPrompts(self.policy), at, seating(0, at))
        kept_s = step_bounds(view, self.seated).prompts_s
        assert kept_s == pytest.approx(step_bounds(view._replace(decodes=counted)).prompts_s, abs=ROUNDING_S)

    def ranked(self) -> Iterable[Ranked]:
        seated, most_s = self.seated, self.times.most_s
        for is_rt in (True, False):
            yield from seated.urgent(self.now, most_s, is_rt)
        for is_rt in (True, False):
            yield from seated.later(self.now, most_s, is_rt)
        yield from seated.late(self.now)


TestKept = Kept.TestCase
TestKept.settings = settings(max_examples=examples(40), stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("late", Late)
@pytest.mark.parametrize("left_s", [-0.5, 0.01, 0.8])
@pytest.mark.parametrize(
    "of",
    [lambda left_s: chat("decode", left_s, output=3), lambda left_s: document("decode", output=3, jct_s=1000 * left_s)],
)
def test_a_decode_has_the_key_with_which_it_is_merged_with_others(
    of: Callable[[float], WorkerRequest], left_s: float, late: Late
) -> None:
    """Decodes are kept in order; prompts that are seated, or wait, are put among them by these keys."""
    at, decode = moment(Policy(late=late)), of(left_s)
    [[anew_at, _]] = RankedRequests([decode], at)
    order = DecodeOrder(at.policy)
    order.refresh([decode], NO_LIMIT, NOW, at.times)
    [[kept_at, _]] = RankedRequests([], at, order)
    assert kept_at == pytest.approx(anew_at)


def test_a_decode_that_ran_stands_once_among_the_urgent_ones() -> None:
    """The place before is swept out later, where it is not at the front."""
    order, decodes = DecodeOrder(Policy()), [chat(f"c{number}", number / 1000, output=3) for number in range(1, 6)]
    order.refresh(decodes, NO_LIMIT, NOW, TIMES[0])
    order.note_run(decodes[1:2])
    decodes[1].output.append(7)
    decodes[1].prefix += 1
    decodes[1].promise.emitted(NOW, len(decodes[1].output))
    order.refresh(decodes, NO_LIMIT, NOW, TIMES[0])
    urgent = [running for _, running in order.urgent(NOW, TIMES[0].most_s, is_rt=True)]
    assert urgent == [decodes[0], *decodes[2:]]


def test_decodes_that_join_together_stand_in_order_among_those_that_are_here() -> None:
    order, here = DecodeOrder(Policy()), chat("here", 0.5, output=3)
    joined = [chat(f"c{left_s}", left_s, output=3) for left_s in (0.9, 0.1, 0.4)]
    order.refresh([here], NO_LIMIT, NOW, TIMES[0])
    order.refresh([here, *joined], NO_LIMIT, NOW, TIMES[0])
    assert order.real_time() == [joined[1], joined[2], here, joined[0]]


def test_of_decodes_that_are_due_together_few_are_looked_at() -> None:
    """Function calls are counted: the first of them bind the step as all do."""
    at = StepContext(NOW, COST, TIMES[0], 2048, 16, 256, Policy(), 256)

    def calls(number: int) -> int:
        order, decodes = DecodeOrder(at.policy), [chat(f"c{each}", 0.5, output=3) for each in range(number)]
        order.refresh(decodes, NO_LIMIT, NOW, at.times)
        view = StepView(decodes, (), WaitingPrompts(at.policy), at, seating(0, at))
        return calls_of(lambda: step_bounds(view, order))

    assert calls(1000) < 2 * calls(100)


def test_a_document_that_waits_for_its_next_step_rises_though_nothing_happens_to_it() -> None:
    policy, later = Policy(age_s=0.5), NOW + 0.6
    order, long, short = DecodeOrder(policy), document("long", output=3), document("short", output=3)
    for running, length in ((long, 100), (short, 10)):
        running.request = replace(running.request, estimate=Estimate(length, length))
        running.promise = promise(running.request, policy, 3)

    def documents(now: float) -> list[WorkerRequest]:
        order.refresh([long, short], NO_LIMIT, now, TIMES[0])
        return [running for _, running in order.later(now, TIMES[0].most_s, is_rt=False)]

    assert documents(NOW) == [short, long]
    order.note_run([short])
    short.promise.emitted(later, 4)
    assert documents(later) == [long, short]


def test_a_step_goes_by_the_tightest_of_those_that_were_late_whoever_has_left() -> None:
    seated, late, other = DecodeOrder(Policy()), chat("late", -0.5, output=3), chat("other", 1.0, output=3)
    seated.refresh([late, other], NO_LIMIT, NOW, TIMES[0])
    seated.refresh([late], NO_LIMIT, NOW, TIMES[0])
    assert seated.least_missed_s == late.request.slo.tbt_s


@pytest.mark.parametrize("num", [2, 3])
def test_an_order_is_kept_only_where_a_step_has_too_few_places(num: int) -> None:
    at, decodes = moment(), [chat(f"c{number}", 1.0 - number / 10, output=3) for number in range(num)]
    kept = Aligned(at.policy, 2).kept(StepView(decodes, (), WaitingPrompts(at.policy), at, seating(0, at)))
    assert (None if kept is None else kept.real_time()) == (decodes[::-1] if num > 2 else None)


@pytest.mark.parametrize(("left_s", "expected_s"), [(0.02, 0.02), (0.016, 0.5)])
def test_a_prompt_binds_a_step_where_it_is_in_time_beside_as_many_decodes_as_run(
    left_s: float, expected_s: float
) -> None:
    """A step has places for 10 of the 20 chats. Beside 10 it takes 18 ms, and beside all 25 ms."""
    policy, decodes = Policy(), [chat(f"c{number}", 0.5, output=3) for number in range(20)]
    at, order, waiting = (
        StepContext(NOW, COST, TIMES[0], 2048, 16, 256, policy, 256),
        DecodeOrder(policy),
        WaitingPrompts(policy),
    )
    waiting.add(chat("new", left_s))
    waiting.refresh(NOW, TIMES[0], at.chunk)
    order.refresh(decodes, 10, NOW, TIMES[0])
    found = step_bounds(StepView(decodes, (), waiting, at, seating(0, at)), order)
    assert found.prompts_s == pytest.approx(expected_s)


def test_a_request_that_was_not_ordered_is_not_kept() -> None:
    """Most workers have places for all their requests, and such workers order no requests."""
    seated = DecodeOrder(Policy())
    for number in range(100):
        seated.refile(chat(f"moved-{number}", 1.0, output=3))
        seated.forget()
    kept = [
        running
        for running in gc.get_objects()
        if type(running) is WorkerRequest and running.request.id.startswith("moved-")
    ]
    assert len(kept) <= 1
