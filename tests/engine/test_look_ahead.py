"""Tests of a worker that plans a step while another runs, its work in a thread: requests say what they say without
it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from alignedserve.core import Chunk, Decode, KvForm, Request, Sampling, StepFailure, StepPlan, StepResult, WorkerLimits
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.engine.device.devices import CPU
from alignedserve.engine.engine import Engine
from alignedserve.engine.in_order import DeviceQueue
from alignedserve.engine.sampling.reading import Done
from alignedserve.executor.hands import EngineHands
from alignedserve.executor.leading import LeadingEngine
from alignedserve.executor.loading import AnEngine
from alignedserve.lab.fuzzing.worker_views import num_preemptions
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.protocol.commands import Command, CopyOut, RunStep, Send
from alignedserve.protocol.events import CopiedOut, Event, Received, StepDone
from alignedserve.protocol.messages import ROUTER, Prefill, Tokens
from alignedserve.protocol.rank_orders import Order
from alignedserve.scheduling.policy import Policy
from alignedserve.worker.setup import WorkerSetup
from tests.engine.deployment import PAGES, asked, deployed
from tests.engine.driver import PLENTY, Drawing, Driver, Replays, prompt_of
from tests.reference import Tally, compare
from tests.samples import POOL_MEMBER, request
from tests.teams import teams

FolderOf = Callable[[str], Path]
DEADLINE_S = 60.0
LIMITS = WorkerLimits(num_blocks=60, block_size=4, page_size=8, max_step_tokens=32, max_batch=8)


class Worker:
    """Core, engine and the thread between them; without a thread if nothing is planned ahead."""

    def __init__(
        self, folder: Path, directory: Path, look_ahead: int, reads_later: bool, engine: Engine | None = None
    ) -> None:
        engine = engine or Engine(folder, num_blocks=LIMITS.num_blocks, block_size=4, dtype="float32")
        engine.reads_later = reads_later
        self.core = decode_core(WorkerSetup(LIMITS, Policy(), look_ahead=look_ahead))
        self.hands = EngineHands(engine, directory / "arena", 8, verify=False, look_ahead=look_ahead)
        self.outputs: dict[str, list[int]] = {}
        self.num_chunks_ahead = 0
        self._events: queue.Queue[Event | Exception] = queue.Queue()

    def serve(self, some: Sequence[Request]) -> dict[str, list[int]]:
        for new_request in some:
            self._tell(Received(ROUTER, Prefill(new_request), 1))
        while self.core.held["blocks"]:
            event = self._events.get(timeout=DEADLINE_S)
            assert not isinstance(event, Exception), event
            self._tell(event)
        self.hands.close()
        return self.outputs

    def _tell(self, event: Event) -> None:
        if isinstance(event, StepDone):
            event = replace(event, seconds=0.0)  # the time that the step took does not matter here
        for command in self.core.handle(event, 0.0):
            if isinstance(command, RunStep) and self.core.steps.has_next:
                self.num_chunks_ahead += len(command.plan.chunks)
            match command:
                case Send(message=Tokens(outputs)):
                    for output in outputs:
                        self.outputs.setdefault(output.request, []).extend(output.tokens)
                case RunStep() if not self.hands.begin_aside(command, self._events.put):
                    done = self.hands.perform(command)
                    assert done is not None
                    self._events.put(done)


def some_requests() -> list[Request]:
    samplings = (Sampling(), Sampling(), Sampling(temperature=0.9, seed=4), Sampling(frequency_penalty=1.0))
    return [
        replace(request(f"r{n}", max_tokens=9 + n), prompt=prompt_of(n, 5 + 3 * n), stop_tokens=(), sampling=sampling)
        for n, sampling in enumerate(samplings)
    ] + [replace(request("long", max_tokens=6), prompt=prompt_of(9, 90), stop_tokens=())]  # in several chunks


@pytest.mark.parametrize("reads_later", [False, True])
def test_all_say_the_same(
    folder_of: FolderOf, reference_of: Callable[[Path], Any], tally: Tally, tmp_path: Path, reads_later: bool
) -> None:
    """Requests are greedy, drawn or penalised; one request ends with a token that is unknown when the next step
    begins."""
    folder, requests = folder_of("gqa-untied"), some_requests()
    plain = Worker(folder, tmp_path, 0, False).serve(requests)
    ends_with = plain["r1"][4]
    requests[1] = replace(requests[1], stop_tokens=(ends_with,))
    worker = Worker(folder, tmp_path, 1, reads_later)
    ahead = worker.serve(requests)
    until = plain["r1"].index(ends_with) + 1
    assert ahead == plain | {"r1": plain["r1"][:until]}
    for said in (requests[0], requests[-1]):
        compare(reference_of(folder), said.prompt, ahead[said.id], tally, "look-ahead")
    assert worker.core.stepping.num_ahead_steps > 5
    assert worker.num_chunks_ahead


def test_captured_steps_that_draw_say_the_same(folder_of: FolderOf, tmp_path: Path) -> None:
    """One request is penalised: its steps are drawn from outside, and those behind it by their graphs again."""
    folder, requests, replays = folder_of("gqa-untied"), some_requests(), Replays()
    requests[3] = replace(requests[3], max_tokens=4)

    def made() -> Engine:
        return Engine(folder, num_blocks=60, block_size=4, dtype="float32", kernels=Drawing(), has_graphs=True)

    captured = made()
    captured.capture(LIMITS.max_batch, replays, lambda: PLENTY, 0, most_tokens=LIMITS.max_step_tokens)
    ahead = Worker(folder, tmp_path, 1, True, captured)
    with patch.object(captured._sampler, "draw", wraps=captured._sampler.draw) as draw:
        assert ahead.serve(requests) == Worker(folder, tmp_path, 0, False, made()).serve(requests)
    assert ahead.core.stepping.num_ahead_steps > 5
    assert 3 < draw.call_count < len(replays.sizes) - 5


@pytest.mark.parametrize("reads_later", [False, True])
def test_two_ranks_say_the_same(folder_of: FolderOf, tmp_path: Path, reads_later: bool) -> None:
    """The second rank gets by name what rank 0 has read, and otherwise what rank 0 sends it."""
    folder, requests, both = folder_of("gqa-untied"), some_requests(), teams(2)
    plain = Worker(folder, tmp_path, 0, False).serve(requests)
    orders: queue.Queue[Order | None] = queue.Queue()

    def made(kind: type[AnEngine], rank: int) -> AnEngine:
        return kind(folder, num_blocks=LIMITS.num_blocks, block_size=4, dtype="float32", ranks=both[rank])

    def follow() -> list[bool]:
        engine, named = made(Engine, 1), list[bool]()
        engine.reads_later = reads_later
        for order in iter(orders.get, None):
            assert isinstance(order, RunStep)
            named += [decode.token is not None for decode in order.plan.decodes]
            assert not engine.step(order.plan).tokens
        return named

    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(follow)
        try:
            leading = made(LeadingEngine, 0)
            leading.say = lambda order: orders.put(order)
            worker = Worker(folder, tmp_path, 1, reads_later, leading)
            assert worker.serve(requests) == plain
        finally:
            orders.put(None)
        assert all(following.result(DEADLINE_S)) is not reads_later
    assert worker.core.stepping.num_ahead_steps > 5


def test_a_whole_deployment_says_the_same(
    folder_of: FolderOf, reference_of: Callable[[Path], Any], tmp_path: Path
) -> None:
    """A prefill worker, a pool and too little memory: a request leaves only while no step is in flight."""
    folder, tally = folder_of("gqa-untied"), Tally()
    policy = Policy(candidate_share=1.0)
    with deployed(folder, "1+1", policy, tmp_path, None, True, 40, PAGES, look_ahead=1) as deployment:
        for request in asked(deployment, 2):
            assert len(deployment.outputs[request.id]) == request.max_tokens
            compare(reference_of(folder), request.prompt, deployment.outputs[request.id], tally, request.id)
        tally.check()
        held = deployment.decodes.held
        assert (held["requests"], held["blocks"], held["pages"]) == (0, 0, 0)
        assert deployment.decodes.stepping.num_ahead_steps > 0
        assert num_preemptions(deployment.decodes) > 0


def test_a_request_without_a_next_token_is_in_no_step_that_goes_on_from_it(folder_of: FolderOf) -> None:
    driver = Driver(Engine(folder_of("gqa-untied"), num_blocks=20, block_size=4, dtype="float32"), 1)
    good, bad = (driver.start(name, prompt_of(n, 6), 4) for n, name in enumerate(("good", "bad")))
    for live in (good, bad):
        driver.prefill(live)
    driver.engine.cache[:, 2 * bad.blocks[0]] = float("inf")
    first = driver.engine.step(StepPlan(8, (), (good.decode(), bad.decode())))
    assert first.unsampled == ("bad",)
    second = driver.engine.step(StepPlan(9, (), (good.decode_ahead(None, 1), bad.decode_ahead(None, 1))))
    assert [name for name, _ in second.tokens] == ["good"]


# --- The thread


PLAIN = StepPlan(1, (), ())


class Posts:
    def __init__(self) -> None:
        self.posted: queue.Queue[Event | Exception] = queue.Queue()

    def __call__(self, event: Event | Exception) -> None:
        self.posted.put(event)

    def next(self) -> Event | Exception:
        return self.posted.get(timeout=DEADLINE_S)


@pytest.mark.parametrize("reads_later", [False, True])
def test_a_worker_where_nothing_decodes_says_first_what_transformers_says(
    folder_of: FolderOf, reference_of: Callable[[Path], Any], tally: Tally, tmp_path: Path, reads_later: bool
) -> None:
    """Its captured steps with prompts are planned behind each other: cut prompts go on, others begin beside them."""
    folder = folder_of("gqa-untied")
    engine = Engine(folder, num_blocks=LIMITS.num_blocks, block_size=4, dtype="float32", has_graphs=True)
    engine.capture(8, replays := Replays(), lambda: PLENTY, 0, most_tokens=LIMITS.max_step_tokens, only_prompts=True)
    worker = Worker(folder, tmp_path, 1, reads_later, engine)
    worker.core = PrefillCore(WorkerSetup(LIMITS, Policy(helps=False), look_ahead=1))
    some = [replace(request(f"r{n}"), prompt=prompt_of(n, tokens)) for n, tokens in enumerate((70, 41, 9))]
    for one in some:
        worker._tell(Received(ROUTER, Prefill(one), 1))
    while len(worker.outputs) < len(some):
        event = worker._events.get(timeout=DEADLINE_S)
        assert not isinstance(event, Exception), event
        worker._tell(event)
    worker.hands.close()
    for one in some:
        compare(reference_of(folder), one.prompt, worker.outputs[one.id], tally, one.id)
    assert worker.num_chunks_ahead >= 3
    assert len(replays.sizes) >= 4


def goes_on(number: int) -> StepPlan:
    return StepPlan(number, (), (Decode("a", None, 4, KvForm((0, 1)), Sampling(), 2),))


def test_a_step_that_goes_on_from_a_failed_step_fails_too() -> None:
    in_order, posts, begun = DeviceQueue(CPU), Posts(), list[int]()

    def begin(plan: StepPlan) -> Done:
        begun.append(plan.number)
        return Done(StepResult(plan.number, (), failure=StepFailure("no memory") if plan.number == 1 else None))

    for plan in (PLAIN, goes_on(2), replace(PLAIN, number=3), goes_on(4)):
        in_order.step(plan, begin, posts)
    done = [posts.next() for _ in range(4)]
    in_order.close()
    assert all(isinstance(event, StepDone) for event in done)
    failures = [event.result.failure for event in done if isinstance(event, StepDone)]
    assert [failure is not None for failure in failures] == [True, True, False, False]
    assert begun == [1, 3, 4]


def test_a_chunk_behind_a_failed_chunk_fails_too_and_runs_from_there_again() -> None:
    in_order, posts, begun = DeviceQueue(CPU), Posts(), list[int]()

    def begin(plan: StepPlan) -> Done:
        begun.append(plan.number)
        return Done(StepResult(plan.number, (), failure=StepFailure("no memory") if plan.number == 1 else None))

    def chunk(number: int, start: int, tokens: int) -> StepPlan:
        return StepPlan(number, (Chunk("a", tuple(range(tokens)), start, KvForm((0, 1)), None),))

    for plan in (chunk(1, 4, 8), chunk(2, 12, 8), chunk(3, 4, 4), chunk(4, 8, 4)):
        in_order.step(plan, begin, posts)
    done = [posts.next() for _ in range(4)]
    in_order.close()
    failures = [event.result.failure for event in done if isinstance(event, StepDone)]
    assert [failure is not None for failure in failures] == [True, True, False, False]
    assert begun == [1, 3, 4]


def test_a_result_that_is_here_wakes_no_other_thread_and_overtakes_none() -> None:
    in_order, posted, may_read = DeviceQueue(CPU), queue.Queue[tuple[int, str]](), threading.Event()

    class Unread:
        """A step that the device still runs."""

        has_failed = False

        def __init__(self, number: int) -> None:
            self._number = number

        def result(self) -> StepResult:
            may_read.wait(DEADLINE_S)
            return StepResult(self._number, ())

    def post(event: Event | Exception) -> None:
        assert isinstance(event, StepDone)
        posted.put((event.result.number, threading.current_thread().name.partition("_")[0]))

    def here(plan: StepPlan) -> Done:
        return Done(StepResult(plan.number, ()))

    in_order.step(PLAIN, here, post)
    assert posted.get(timeout=DEADLINE_S) == (PLAIN.number, "work")
    in_order.step(replace(PLAIN, number=2), lambda plan: Unread(plan.number), post)
    in_order.step(replace(PLAIN, number=3), here, post)
    may_read.set()
    assert [posted.get(timeout=DEADLINE_S)[0] for _ in range(2)] == [2, 3]
    in_order.close()


def test_what_is_no_step_waits_for_those_before_it() -> None:
    in_order, posts = DeviceQueue(CPU), Posts()
    in_order.step(PLAIN, lambda plan: Done(StepResult(plan.number, ())), posts)
    in_order.do(lambda: False, lambda: posts(CopiedOut(5)), posts)
    assert isinstance(posts.next(), StepDone)
    assert posts.next() == CopiedOut(5)
    assert in_order.meanwhile(lambda: 7) == 7
    in_order.close()


@pytest.mark.parametrize("when", ["begun", "read"])
def test_a_device_that_is_lost_ends_it_all(when: str) -> None:
    """The shell raises what is posted, and the process ends; callers that wait get the error too."""
    lost = RuntimeError("CUDA error: an illegal memory access was encountered")

    class Lost:
        has_failed = False

        def result(self) -> StepResult:
            raise lost

    def begin(_plan: StepPlan) -> Lost:
        if when == "begun":
            raise lost
        return Lost()

    in_order, posts = DeviceQueue(CPU), Posts()
    in_order.step(PLAIN, begin, posts)
    assert posts.next() is lost
    in_order.step(goes_on(2), begin, posts)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        in_order.meanwhile(lambda: 7)
    in_order.close()


@pytest.mark.parametrize("when", ["begun", "read"])
def test_a_panic_of_a_library_in_rust_ends_it_all(when: str) -> None:
    """It is no Exception: unheard, its step would hang until its limit."""

    class PanicException(BaseException):
        def result(self) -> StepResult:
            raise self

        has_failed = False

    def begin(_plan: StepPlan) -> PanicException:
        if when == "begun":
            raise PanicException("a bug")
        return PanicException("a bug")

    in_order, posts = DeviceQueue(CPU), Posts()
    in_order.step(PLAIN, begin, posts)
    posted = posts.next()
    assert isinstance(posted, RuntimeError)
    assert "a bug" in str(posted)
    in_order.close()


def test_hands_with_a_thread_do_all_in_it_and_meet_pools_between(folder_of: FolderOf, tmp_path: Path) -> None:
    engine = Engine(folder_of("gqa-untied"), num_blocks=20, block_size=4, dtype="float32")
    hands, posts = EngineHands(engine, tmp_path / "arena", 8, verify=False, look_ahead=1), Posts()
    hands.meet(POOL_MEMBER)  # this pool has no arena
    commands: list[Command] = [CopyOut(3, POOL_MEMBER.holder, (0, 1), (0,), (1, 2, 3)), RunStep(StepPlan(4))]
    for command in commands:
        assert hands.begin_aside(command, posts)
    assert posts.next() == CopiedOut(3)
    assert isinstance(posts.next(), StepDone)
    hands.part_from(POOL_MEMBER)
    hands.close()
