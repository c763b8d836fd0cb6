"""A step pauses for the prompts of chats: which may, for how long, and what may happen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from alignedserve.core import (
    Request,
    ServiceClass,
    Slo,
    StepFailure,
    StepPlan,
    StepResult,
    WorkerLimits,
)
from alignedserve.cost.fit import OnlineCost
from alignedserve.cost.model import Coefficients, CostModel, Kind
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.decode_worker.pausing import MOST_PAUSES
from alignedserve.decode_worker.state import DecodeCore
from alignedserve.papers.names import SchedulerName
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.protocol.commands import Command, CopyOut, RunAmid, RunStep, Send
from alignedserve.protocol.events import Event, MemberJoined, StepDone
from alignedserve.protocol.messages import ROUTER, AskPages, Cancel, LeasePages, Output, Prefill, Tokens, Used
from alignedserve.schedulers.aligned import Aligned
from alignedserve.scheduling.policy import Chunking, Policy
from alignedserve.worker.setup import WorkerSetup
from tests.samples import POOL_MEMBER, request, said

LIMITS = WorkerLimits(num_blocks=128, block_size=4, page_size=8, max_step_tokens=400, max_batch=8)
TOKEN_S, LAYERS = 1e-3, 10
SLO = Slo(ttft_s=2.0, tbt_s=1.0)


class KnownCost(OnlineCost):
    """A cost model in which a step takes 20 ms and a millisecond for each token, whatever steps take."""

    def __init__(self) -> None:
        of = Coefficients(fixed=20 * TOKEN_S, token=(TOKEN_S,))
        self._known = CostModel(dict.fromkeys(Kind, of))

    @property
    def model(self) -> CostModel:
        return self._known

    @property
    def slowdown(self) -> float:
        return 1.0

    def learn(self, shape: object, seconds: float) -> None: ...


def chat(name: str, tokens: int = 20, slo: Slo = SLO, max_tokens: int = 5, caller: str = "") -> Request:
    of = replace(request(name, max_tokens=max_tokens), prompt=tuple(range(1, 1 + tokens)), stop_tokens=(), slo=slo)
    return replace(of, salt=caller)


def document(name: str, tokens: int = 200) -> Request:
    return replace(
        chat(name, tokens), service=ServiceClass.BE, slo=Slo(jct_s=600.0), prompt=tuple(range(900, 900 + tokens))
    )


class Bench:
    """A worker whose steps the test ends."""

    def __init__(
        self, layers: int = LAYERS, policy: Policy | None = None, kind: str = "decode", look_ahead: int = 0
    ) -> None:
        policy = policy or Policy(reuse=False)
        setup = WorkerSetup(LIMITS, policy, KnownCost(), layers=layers, look_ahead=look_ahead)
        self.core: DecodeCore = PrefillCore(setup) if kind == "prefill" else decode_core(setup)
        self.now, self.steps, self.amid = 0.0, list[StepPlan](), list[StepPlan]()
        self.outputs: list[Output] = []
        self.copies, self.spent = list[CopyOut](), dict[str, float]()

    def _take(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case RunAmid(plan):
                    self.amid.append(plan)
                case RunStep(plan):
                    self.steps.append(plan)
                case Send(message=Tokens(outputs)):
                    self.outputs += outputs
                case Send(message=Used(uses)):
                    self.spent |= {use.request: use.spent.seconds for use in uses}
                case Send(message=AskPages(pages, number)):
                    start = sum(len(copy.pages) for copy in self.copies)
                    self._hears(said("pool-0", LeasePages((*range(start, start + pages),), number)))
                case CopyOut():
                    self.copies.append(command)

    def _hears(self, event: Event) -> None:
        self._take(self.core.handle(event, self.now))

    def hears(self, message: Prefill | Cancel) -> None:
        self._hears(said(ROUTER, message))

    def has_pool(self) -> None:
        self._hears(MemberJoined(POOL_MEMBER))

    def comes(self, *some: Request) -> None:
        for each in some:
            self.hears(Prefill(replace(each, arrival_at=self.now)))

    def ends(self, plan: StepPlan, failure: StepFailure | None = None) -> None:
        """End a step: each request that samples gets token 7."""
        sampled = tuple((part.request, 7) for part in plan.parts if part.sampling is not None and failure is None)
        result = StepResult(plan.number, sampled, failure=failure)
        self._hears(StepDone(result, plan.predicted_s))

    @property
    def said(self) -> list[str]:
        return [output.request for output in self.outputs]


def names(plan: StepPlan) -> list[str]:
    return [part.request for part in plan.parts]


def paused(**setup: Any) -> Bench:
    """Return a worker in whose step with a document a chat has come."""
    bench = Bench(**setup)
    bench.comes(document("d"))
    bench.now += 0.02
    bench.comes(chat("a"))
    return bench


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_a_chat_runs_alone_in_a_pause_of_a_document(kind: str) -> None:
    bench = paused(kind=kind)
    [step], [amid] = bench.steps, bench.amid
    assert (names(step), names(amid)) == (["d"], ["a"])
    bench.ends(amid)
    assert bench.said == ["a"]
    assert len(bench.steps) == 1, "the document's step goes on"
    bench.ends(step)
    assert bench.core.held["requests"] == 2
    if kind == "decode":
        assert set(names(bench.steps[1])) == {"a", "d"}


def test_the_next_chat_gets_a_pause_of_its_own_but_not_for_ever() -> None:
    bench = paused()
    for number in range(1, MOST_PAUSES + 2):
        bench.comes(chat(f"next{number}"))
        assert len(bench.amid) == min(number, MOST_PAUSES), "one at a time"
        if number <= MOST_PAUSES:
            bench.ends(bench.amid[-1])
    assert len(bench.amid) == MOST_PAUSES
    assert len(bench.steps) == 1


@pytest.mark.parametrize(
    "setup",
    [
        {"layers": 0},
        {"policy": Policy(reuse=False, scheduler=SchedulerName.FCFS, chunking=Chunking.FIXED)},
    ],
)
def test_where_steps_do_not_pause_a_chat_waits(setup: dict[str, Any]) -> None:
    bench = paused(**setup)
    assert not bench.amid
    bench.ends(bench.steps[0])
    assert "a" in names(bench.steps[1])


def test_a_step_that_has_nearly_ended_does_not_pause() -> None:
    bench = Bench()
    bench.comes(document("d", 200))
    bench.now += (1 - 1.5 / LAYERS) * bench.steps[0].predicted_s
    bench.comes(chat("a"))
    assert not bench.amid


def flooded(prompts: int = 0, slo: Slo = SLO) -> Bench:
    """Return a worker in a step with six chats of a host that decode, or with prompts of this many tokens; guests of
    another caller have been here before."""
    bench = Bench()
    bench.comes(chat("before", caller="ann", max_tokens=1))
    floods = [chat(f"b{number}", prompts or 4, slo, 50, "bob") for number in range(6)]
    bench.comes(*floods)
    bench.ends(bench.steps[0])
    if not prompts:
        bench.ends(bench.steps[1])
    return bench


@pytest.mark.parametrize("prompts", [0, 60])
def test_a_guest_runs_in_a_pause_of_anothers_chats(prompts: int) -> None:
    bench = flooded(prompts)
    step = bench.steps[-1]
    assert all(name.startswith("b") for name in names(step))
    bench.comes(chat("host's", 4, caller="bob"))
    assert not bench.amid, "the host's chats wait for the end of their own step"
    bench.comes(chat("guest", 4, caller="ann"))
    assert [names(amid) for amid in bench.amid] == [["guest"]]
    bench.ends(bench.amid[0])
    assert bench.said[-1] == "guest"
    bench.ends(step)
    assert "guest" in names(bench.steps[-1]), "and goes on beside the host's"


def long_prompt_beside_decodes_of_guests() -> Bench:
    """Return a worker in a step with 50 tokens of a host's long prompt, where four chats of guests decode."""
    bench = Bench()
    bench.comes(*(chat(f"a{number}", 4, max_tokens=50, caller="ann") for number in range(4)))
    bench.ends(bench.steps[0])
    bench.comes(chat("b0", 5, max_tokens=1, caller="bob"))  # the host's chats are known
    bench.ends(bench.steps[1])
    bench.comes(chat("b1", 400, max_tokens=1, caller="bob"))
    bench.ends(bench.steps[2])
    return bench


def test_a_caller_with_one_long_prompt_is_a_host_beside_many_decodes_of_guests() -> None:
    """Guests whose every token waits for a step of the host's long prompt pile up: soon most requests are theirs."""
    bench = long_prompt_beside_decodes_of_guests()
    step = bench.steps[-1]
    assert [chunk.request for chunk in step.chunks] == ["b1"]
    assert len(step.chunks[0].tokens) <= bench.core.pace.pivot
    bench.comes(chat("guest", 4, caller="ann"))
    assert [names(amid) for amid in bench.amid] == [["guest"]]


def flood_of(callers: str, each: int) -> Bench:
    """Return a worker in a step with decodes of these callers, where a chat of ann's has been."""
    bench = Bench()
    bench.comes(chat("before", 4, max_tokens=1, caller="ann"))
    bench.comes(
        *(chat(f"{caller}{number}", 4, max_tokens=50, caller=caller) for caller in callers for number in range(each))
    )
    for _ in range(2):
        bench.ends(bench.steps[-1])
    return bench


@pytest.mark.parametrize(("callers", "each", "pauses"), [("bc", 3, True), ("bc", 2, False), ("bcdefg", 1, False)])
def test_a_few_callers_with_nearly_all_are_hosts_together(callers: str, each: int, pauses: bool) -> None:
    """Each of them has three times what all others have, and three requests; else they are callers like the next."""
    bench = flood_of(callers, each)
    bench.comes(chat("host's", 4, caller="b"))
    assert not bench.amid
    bench.comes(chat("guest", 4, caller="ann"))
    assert [names(amid) for amid in bench.amid] == [["guest"]] * pauses


def test_guests_of_two_hosts_run_before_the_hosts_decodes() -> None:
    bench = flood_of("bc", 3)
    bench.now += 0.95 * bench.steps[-1].predicted_s
    bench.comes(chat("guest", 4, caller="ann"), chat("host's", 4, caller="b"))
    bench.ends(bench.steps[-1])
    assert names(bench.steps[-1]) == ["guest"]


def test_where_nobody_has_nearly_all_nobody_is_a_guest() -> None:
    bench = Bench()
    bench.comes(*(chat(f"{caller}{number}", 4, max_tokens=50, caller=caller) for number in "12" for caller in "abc"))
    bench.ends(bench.steps[0])
    bench.ends(bench.steps[1])
    bench.comes(chat("guest", 4, caller="a"))
    assert not bench.amid


def test_a_guest_with_a_long_prompt_waits() -> None:
    bench = flooded()
    bench.comes(chat("long", 100, caller="ann"))
    assert not bench.amid
    bench.ends(bench.steps[-1])
    assert "long" in names(bench.steps[-1])


def test_guests_have_half_of_the_time_at_most() -> None:
    """A pause may take longer than its step, as a prompt's first token does, and the next steps make up for it."""
    bench = flooded()
    first, num_waited = len(bench.steps) - 1, 0
    for number in range(12):
        num_pauses = len(bench.amid)
        bench.comes(chat(f"guest{number}", 12, max_tokens=1, caller="ann"))
        for amid in bench.amid[num_pauses:]:
            bench.ends(amid)
        num_waited += num_pauses == len(bench.amid)
        bench.ends(bench.steps[-1])
        while bench.steps[-1].chunks:
            bench.ends(bench.steps[-1])
    of_host = [step for step in bench.steps[first:] if any(name.startswith("b") for name in names(step))]
    paused_s, of_host_s = (sum(step.predicted_s for step in steps) for steps in (bench.amid, of_host))
    assert bench.amid[0].predicted_s > bench.steps[first].predicted_s
    assert num_waited > 0
    assert 0.5 * of_host_s < paused_s < of_host_s + bench.amid[0].predicted_s


def test_a_step_of_guests_alone_does_not_make_up_for_a_long_pause() -> None:
    """A pause of 64 ms in a step of 26 leaves 38 for steps of the host to make up for."""
    bench = flooded()
    bench.comes(chat("long", 44, max_tokens=1, caller="ann"))
    bench.ends(bench.amid[0])
    bench.comes(chat("visitor", 3, max_tokens=1, caller="ann"))
    bench.ends(bench.steps[-1])
    assert names(bench.steps[-1]) == ["visitor"]
    bench.ends(bench.steps[-1])
    bench.comes(chat("guest", 4, caller="ann"))
    assert [names(amid) for amid in bench.amid] == [["long"]]


def test_a_guest_runs_in_a_pause_of_anothers_single_decode() -> None:
    bench = Bench()
    bench.comes(chat("before", 4, max_tokens=1, caller="ann"))
    bench.comes(chat("stream", 4, max_tokens=50, caller="bob"))
    for _ in range(2):
        bench.ends(bench.steps[-1])
    assert names(bench.steps[-1]) == ["stream"]
    bench.comes(chat("guest", 4, caller="ann"))
    assert [names(amid) for amid in bench.amid] == [["guest"]]


@pytest.mark.parametrize(("passed", "pauses"), [(0.7, True), (0.95, False)])
def test_a_guest_waits_for_a_quarter_of_its_own_time_at_most(passed: float, pauses: bool) -> None:
    """A prompt of 4 tokens takes 24 ms, and the step of six decodes 26: 7.8 ms are left of it, or 1.3."""
    bench = flooded()
    bench.now += passed * bench.steps[-1].predicted_s
    bench.comes(chat("guest", 4, caller="ann"))
    assert bool(bench.amid) is pauses
    bench.ends(bench.steps[-1])
    assert (bench.amid or bench.steps[-1:])[-1].parts[0].request == "guest"
    if pauses:  # behind the step, where that ends first
        assert len(bench.steps) == 3
        bench.ends(bench.amid[0])
        assert "guest" in bench.said


@pytest.mark.parametrize("documents", [0, 200])
def test_a_guest_does_not_wait_for_the_end_of_a_step_because_it_has_nearly_ended(documents: int) -> None:
    """With 1.5 layers left, as predicted, other chats wait: the step may end first. A guest's prompt runs then."""
    bench = Bench()
    bench.comes(chat("before", 4, max_tokens=1, caller="ann"))
    bench.ends(bench.steps[-1])
    if documents:
        bench.comes(replace(document("d", documents), salt="bob"))
    else:
        bench.comes(chat("d", 200, caller="bob"))
    bench.now += (1 - 1.5 / LAYERS) * bench.steps[-1].predicted_s
    bench.comes(chat("bob's", 4, caller="bob"))
    assert not bench.amid
    bench.comes(chat("guest", 4, caller="ann"))
    assert [names(amid) for amid in bench.amid] == [["guest"]]


def test_a_guests_prompt_does_not_make_the_hosts_next_chat_a_guest() -> None:
    """The guest's prompt has four times as many tokens as there are decodes of the host."""
    bench = Bench()
    bench.comes(chat("before", 4, max_tokens=1, caller="ann"))
    bench.comes(*(chat(f"b{number}", 4, max_tokens=50, caller="bob") for number in range(3)))
    bench.ends(bench.steps[-1])
    bench.now += bench.steps[-1].predicted_s  # too late for a pause
    bench.comes(chat("guest", 12, caller="ann"))
    bench.ends(bench.steps[-1])
    assert names(bench.steps[-1]) == ["guest", "b0", "b1", "b2"]
    bench.comes(chat("b3", 4, caller="bob"))
    assert not bench.amid


@pytest.mark.parametrize(("num_late", "pauses"), [(2, True), (3, False)])
def test_a_guests_first_token_is_worth_late_tokens_of_two_of_the_hosts_chats(num_late: int, pauses: bool) -> None:
    """The next tokens of the first chats are due when the step ends; the others have a second."""
    bench = Bench()
    bench.comes(chat("before", 4, max_tokens=1, caller="ann"))
    tight, wide = replace(SLO, tbt_s=0.03), SLO
    bench.comes(*(chat(f"b{at}", 4, tight if at < num_late else wide, 50, "bob") for at in range(6)))
    for _ in range(2):
        bench.ends(bench.steps[-1])
    assert len(bench.steps[-1].decodes) == 6
    bench.comes(chat("guest", 4, caller="ann"))
    assert bool(bench.amid) is pauses


@pytest.mark.parametrize(("ttft_s", "pauses"), [(2.0, True), (0.43, False)])
def test_a_pause_leaves_the_first_tokens_of_the_step_in_time(ttft_s: float, pauses: bool) -> None:
    bench = flooded(60, slo=replace(SLO, ttft_s=ttft_s))
    bench.comes(chat("guest", 40, caller="ann"))
    assert bool(bench.amid) is pauses


def test_a_chat_gets_a_pause_where_documents_have_all_seats() -> None:
    bench = Bench()
    bench.comes(*(document(f"d{number}", 20) for number in range(LIMITS.max_batch)))
    bench.ends(bench.steps[0])
    while bench.core.here.prompts:
        bench.ends(bench.steps[-1])
    assert bench.core.here.num_seated == LIMITS.max_batch
    bench.comes(chat("a", 4))
    assert [names(amid) for amid in bench.amid] == [["a"]]


def test_a_step_with_a_chats_prompt_does_not_pause() -> None:
    bench = Bench()
    bench.comes(chat("a"))
    assert names(bench.steps[0]) == ["a"]
    bench.comes(chat("b"))
    assert not bench.amid


@pytest.mark.parametrize(("tbt_s", "pauses"), [(1.0, True), (0.5, True), (0.25, False)])
def test_a_pause_leaves_the_chats_of_the_step_in_time(tbt_s: float, pauses: bool) -> None:
    """A chat decodes beside the document; its next token is due while the step would pause."""
    bench = Bench()
    bench.comes(chat("a", 4, replace(SLO, tbt_s=tbt_s)))
    bench.comes(document("d"))
    bench.ends(bench.steps[0])
    assert set(names(bench.steps[1])) == {"a", "d"}
    left_s = bench.steps[1].predicted_s
    bench.comes(chat("b", 150))
    assert bool(bench.amid) is pauses
    if pauses:
        assert left_s + bench.amid[0].predicted_s <= tbt_s


def test_a_document_waits_for_the_next_step() -> None:
    bench = Bench()
    bench.comes(document("d"))
    bench.comes(document("e"))
    assert not bench.amid


def test_a_chat_without_free_memory_takes_none_of_the_step() -> None:
    bench = Bench()
    bench.comes(document("d", 390))
    bench.comes(chat("a", 300))
    assert not bench.amid
    assert bench.core.here.find("d") is not None


def test_a_step_that_ends_before_its_pause_lets_the_chats_step_run_behind_it() -> None:
    bench = paused()
    [step], [amid] = bench.steps, bench.amid
    bench.ends(step)
    assert len(bench.steps) == 1, "one step at a time"
    bench.comes(document("e"))
    bench.comes(chat("b"))
    assert len(bench.amid) == 1
    bench.ends(amid)
    assert set(names(bench.steps[1])) >= {"a", "b"}


@pytest.mark.parametrize("first", ["amid", "step"])
@pytest.mark.parametrize("gone", ["a", "d"])
def test_blocks_of_a_cancelled_request_are_free_when_both_steps_have_ended(gone: str, first: str) -> None:
    bench = paused()
    plans = [bench.amid[0], bench.steps[0]]
    bench.hears(Cancel(gone, 0))
    free = bench.core.memory.num_free
    for plan in plans if first == "amid" else plans[::-1]:
        assert bench.core.memory.num_free == free
        bench.ends(plan)
    assert bench.core.memory.num_free > free
    left = {"a", "d"} - {gone}
    assert set(names(bench.steps[1])) == left


@pytest.mark.parametrize("first", ["amid", "step"])
@pytest.mark.parametrize("gone", ["a", "d"])
def test_a_cancelled_request_is_charged_whichever_step_ends_first(gone: str, first: str) -> None:
    bench = Bench()
    bench.comes(replace(document("d"), is_metered=True))
    bench.now += 0.02
    bench.comes(replace(chat("a"), is_metered=True))
    [amid], [step] = bench.amid, bench.steps
    bench.hears(Cancel(gone, 0))
    for plan in (amid, step) if first == "amid" else (step, amid):
        bench.ends(plan)
    assert bench.spent[gone] == pytest.approx((amid if gone == "a" else step).predicted_s)
    assert not bench.core.owners.has_left


@pytest.mark.parametrize("fails", ["amid", "step"])
def test_a_step_that_fails_takes_nothing_of_the_other_with_it(fails: str) -> None:
    bench = paused()
    [step], [amid] = bench.steps, bench.amid
    few = StepFailure("no memory")
    bench.ends(amid, few if fails == "amid" else None)
    bench.ends(step, few if fails == "step" else None)
    assert bench.said == (["d"] if fails == "amid" else ["a"])
    while (running := bench.core.steps.running) is not None:
        bench.ends(running)
    assert {output.request for output in bench.outputs if output.finish is not None} == {"a", "d"}


@pytest.mark.parametrize("first", ["amid", "step"])
def test_a_step_is_planned_ahead_only_when_the_pause_has_ended(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat is cancelled in the pause of a decode: nothing else keeps the next decode from being planned then."""
    bench, goes_on = Bench(look_ahead=1), Aligned.goes_on
    monkeypatch.setattr(Aligned, "goes_on", lambda *_: False)
    bench.comes(replace(document("d"), max_tokens=50))
    bench.ends(bench.steps[0])
    bench.comes(chat("a", 10))
    [amid], step = bench.amid, bench.steps[1]
    monkeypatch.setattr(Aligned, "goes_on", goes_on)
    bench.hears(Cancel("a", 1))
    assert bench.steps[-1] is step
    for plan in (amid, step) if first == "amid" else (step, amid):
        bench.ends(plan)
    while (running := bench.core.steps.running) is not None:
        bench.ends(running)
    assert [output.index for output in bench.outputs if output.request == "d"] == [*range(50)]


def test_a_pause_without_memory_says_little_of_smaller_steps() -> None:
    """The device has had memory for 380 tokens, and none for 20 more beside them."""
    bench = Bench()
    bench.comes(document("d", 380))
    bench.comes(chat("a", 20))
    bench.ends(bench.amid[0], StepFailure("no memory"))
    assert bench.core.pace.room.tokens == 200
    assert len(bench.amid) == 1, "nor would there be any in the next pause"
    bench.ends(bench.steps[0])
    assert "a" in names(bench.steps[1])


def test_a_document_has_not_waited_in_the_pauses_of_its_step() -> None:
    bench = Bench()
    bench.comes(document("d"))
    [step] = bench.steps
    for name in ("a", "b"):
        bench.now += 0.02
        bench.comes(chat(name))
        bench.now += bench.amid[-1].predicted_s
        bench.ends(bench.amid[-1])
    bench.now = step.predicted_s + sum(amid.predicted_s for amid in bench.amid)
    bench.ends(step)
    document_d, chat_b = bench.core.here.find("d"), bench.core.here.find("b")
    assert document_d is not None
    assert chat_b is not None
    assert (document_d.waited_s, chat_b.waited_s) == (pytest.approx(0.0), pytest.approx(0.0))


def loaded_token_s(bench: Bench) -> float:
    """Return how long the worker says that a prompt token takes beside others, times what it takes alone."""
    backlog = bench.core.router.rate.backlog(bench.now)
    return backlog.loaded_token_s / backlog.prompt_token_s


def test_a_document_that_runs_does_not_wait_in_a_pause() -> None:
    bench = paused()
    bench.now += bench.amid[0].predicted_s
    bench.ends(bench.amid[0])
    bench.now = bench.amid[0].predicted_s + bench.steps[0].predicted_s
    bench.ends(bench.steps[0])
    assert loaded_token_s(bench) == pytest.approx(1.0)


def test_a_chat_that_runs_behind_the_step_has_not_waited_for_it() -> None:
    bench = paused()
    for plan in (bench.steps[0], bench.amid[0]):
        bench.now += plan.predicted_s
        bench.ends(plan)
    assert loaded_token_s(bench) == pytest.approx(1.0)


@pytest.mark.parametrize("when", ["before", "in", "after"])
def test_what_comes_in_a_step_has_not_waited_for_it_whether_it_pauses_or_not(when: str) -> None:
    bench = Bench()
    bench.comes(document("d", 350))
    queue = bench.core.queue
    if when == "before":
        bench.comes(document("e", 350))
    bench.comes(chat("a"))
    assert (queue.num_old(only_rt=False), queue.num_old(only_rt=True)) == (0, 0)
    if when == "in":
        bench.comes(document("e", 350))
    bench.ends(bench.amid[0])
    if when == "after":
        bench.comes(document("e", 350))
    assert (queue.num_old(only_rt=False), queue.num_old(only_rt=True)) == (0, 0)


@pytest.mark.parametrize(("first", "num_pauses"), [("amid", 1), ("step", 0)])
def test_pauses_are_counted_that_were_made(first: str, num_pauses: int) -> None:
    bench = paused()
    assert bench.core.log.counts.num_pauses == 0
    bench.ends((bench.amid if first == "amid" else bench.steps)[0])
    bench.ends((bench.steps if first == "amid" else bench.amid)[0])
    assert bench.core.log.counts.num_pauses == num_pauses


def test_the_next_chat_writes_to_no_block_that_is_still_to_be_copied() -> None:
    """A prefill worker orders the copy of a chat that leaves behind the step, and the next chat runs in a pause."""
    bench = Bench(kind="prefill")
    bench.has_pool()
    bench.comes(document("d"))
    bench.now += 0.02
    bench.comes(chat("a", 24))
    bench.ends(bench.amid[0])
    [copy] = bench.copies
    free = bench.core.memory.num_free
    bench.comes(chat("b", 24))
    assert names(bench.amid[1]) == ["b"]
    assert not set(copy.blocks) & set(bench.amid[1].chunks[0].kv.blocks)
    bench.ends(bench.amid[1])
    bench.ends(bench.steps[0])
    assert bench.core.memory.num_free > free


def test_blocks_that_come_free_behind_the_step_are_not_for_a_pause() -> None:
    """A copy of these blocks may be ordered behind the step."""
    bench = Bench()
    bench.comes(document("d"))
    memory = bench.core.memory
    memory.give(memory.blocks.take(1) or ())
    bench.comes(chat("a"))
    assert not bench.amid
