"""The whole system in virtual time: the same from the same seed, and right in every topology."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alignedserve.config.topology import Topology
from alignedserve.core import Chunk, Decode, History, KvForm, Sampling, Scoring, StepPlan, StepResult, WorkerLimits
from alignedserve.cost.trials import NOBODY
from alignedserve.lab.loads.records.records import RequestRecord
from alignedserve.lab.loads.workload import Workload, arrivals
from alignedserve.lab.simulator.machines.engine import CheckedHands, Costs, TaggedArena, WrongKV, story_from
from alignedserve.lab.simulator.run import Simulation
from alignedserve.lab.simulator.settings import Settings
from alignedserve.protocol.commands import CopyIn, CopyOut, RunStep
from alignedserve.protocol.events import CopiedIn, CopiedOut
from alignedserve.protocol.extents import Extents
from tests.conftest import SOAK
from tests.rare import rare, rarely
from tests.samples import POOL_MEMBER, member, request
from tests.simulator.summary import simulate, summary_of

SMALL = Settings(seed=1, topology=Topology(1, 2), workload=Workload(num_requests=30, leaving_share=0.2))
ROOMY = Settings().limits
TIGHT = WorkerLimits(num_blocks=40, block_size=16, page_size=64, max_step_tokens=64, max_batch=4)


def test_the_same_seed_is_the_same_run_and_another_is_another() -> None:
    small = replace(SMALL, workload=Workload(num_requests=12, leaving_share=0.2))
    first = simulate(small)
    assert simulate(small) == first
    assert simulate(replace(small, seed=2)).digest != first.digest


@pytest.mark.parametrize("beside", [False, True])
def test_steps_go_on_while_a_request_is_copied_to_the_device_if_copies_go_beside_them(beside: bool) -> None:
    slow = Settings(seed=1, topology=Topology(1, 1), timing=Costs(page_s=0.1), record=True, copies_beside=beside)
    simulation = Simulation(replace(slow, workload=Workload(num_requests=12, rate=4.0)))
    assert summary_of(simulation).problems == ()
    record = simulation.record(0.0)
    joins = [copy for copy in record.copies if copy.worker == "decode-0" and copy.to_device]
    steps = [step for step in record.steps if step.worker == "decode-0"]
    assert {copy.aside for copy in joins} == {beside}
    is_overlapped = any(
        step.began_at < copy.began_at + copy.seconds and copy.began_at < step.began_at + step.seconds
        for copy in joins
        for step in steps
    )
    assert is_overlapped is beside


@pytest.mark.parametrize(
    ("topology", "limits"),
    [
        *(("colocated", TIGHT), ("1+3", TIGHT), ("2+1", ROOMY)),
        *map(rarely, [("colocated", ROOMY), ("1+1", ROOMY), ("1+1", TIGHT), ("1+3", ROOMY), ("2+1", TIGHT)]),
        *map(rarely, [("2+2", ROOMY), ("2+2", TIGHT)]),
    ],
)
def test_all_requests_end_with_their_tokens_and_all_memory_is_free(topology: str, limits: WorkerLimits) -> None:
    """The run's `problems` name wrong tokens, requests that never ended, and whatever a core still holds at the end."""
    workload = Workload(num_requests=40, rate=100.0)
    summary = simulate(
        Settings(topology=Topology.parse(topology), workload=workload, limits=limits, num_pages=12, num_gateways=2)
    )
    assert summary.problems == ()
    assert summary.num_finished == 40


@rare
def test_many_requests() -> None:
    number = 5000 if SOAK else 120
    summary = simulate(Settings(topology=Topology.parse("2+2"), workload=Workload(number, rate=100.0)))
    assert (summary.problems, summary.num_finished) == ((), number)


def test_clients_that_leave_leave_nothing_behind() -> None:
    summary = simulate(replace(SMALL, workload=Workload(num_requests=40, leaving_share=0.8, patience_s=0.05)))
    assert summary.problems == ()
    assert summary.num_left > 10
    assert summary.num_left + summary.num_finished == 40


def test_beyond_the_bound_requests_are_refused() -> None:
    summary = simulate(replace(SMALL, most_open=2, workload=Workload(num_requests=40, rate=500.0)))
    assert summary.problems == ()
    assert 0 < summary.num_refused < 40
    assert summary.num_refused + summary.num_finished == 40


def test_nothing_is_kept_of_requests_that_ended_where_a_listener_hears_of_each() -> None:
    settings = Settings(workload=Workload(num_requests=40, rate=500), most_open=10, checked=False)
    kept, heard = Simulation(settings), list[RequestRecord]()
    listened = Simulation(settings)
    listened.clients.on_end = heard.append
    assert summary_of(kept).num_refused > 0
    assert summary_of(listened).num_requests == 0
    assert listened.clients.kept == {}
    assert sorted(heard, key=lambda record: (record.arrival_at, record.id)) == kept.record(0.0).requests


def test_output_depends_on_the_request_alone() -> None:
    """The summary's check of tokens needs this: batches differ between topologies, tokens must not."""
    drawn = list(arrivals(Workload(num_requests=5), ("gateway-0",), seed=3, start_at=0.0))
    again = list(arrivals(Workload(num_requests=5), ("gateway-1",), seed=3, start_at=9.0))
    for arrival, same in zip(drawn, again, strict=True):
        assert story_from(arrival.request, arrival.length).output == story_from(same.request, same.length).output


def test_kv_that_was_copied_and_gives_no_token_is_computed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer cannot go on once, at its first decode."""
    step, spoiled = CheckedHands._step, set[str]()

    def without_some(hands: CheckedHands, plan: StepPlan) -> StepResult:
        result = step(hands, plan)
        new = {decode.request for decode in plan.decodes if not decode.request.startswith(NOBODY)} - spoiled
        spoiled.update(new)
        result.tokens = tuple(sampled for sampled in result.tokens if sampled[0] not in new)
        result.unsampled = tuple(sorted(new))
        return result

    monkeypatch.setattr(CheckedHands, "_step", without_some)
    policy = replace(Settings().policy, helps=False)  # a decode worker's own prompts have no copied KV
    run = Settings(topology=Topology(1, 2), workload=Workload(num_requests=30), policy=policy, num_gateways=2)
    summary = simulate(run)
    assert summary.problems == ()
    assert summary.num_finished == 30
    assert len(spoiled) > 20


class TestEngine:
    """The engine notices wrong KV: a simulator that cannot fail proves nothing."""

    A = request("a", prompt=6, max_tokens=9)
    PROMPT = Chunk("a", (1, 2, 3, 4, 5, 6), 0, KvForm((0, 1)), A.sampling)

    @pytest.fixture
    def arena(self) -> TaggedArena:
        return TaggedArena(8, Extents(100))

    @pytest.fixture
    def engine(self, arena: TaggedArena) -> CheckedHands:
        second = replace(request("b", max_tokens=9), prompt=(6, 5, 4, 3, 2, 1))  # other words, so other KV
        stories = {"a": story_from(self.A, 9), "b": story_from(second, 9)}
        engine = CheckedHands(stories, Costs(), WorkerLimits(4, 4, 8, 64, 4), arena=lambda _: arena)
        engine.meet(POOL_MEMBER)
        engine.finish(RunStep(StepPlan(1, (self.PROMPT,))), 0.0)
        return engine

    def decode(self, blocks: tuple[int, ...], start: int = 6, index: int = 1, name: str = "a") -> RunStep:
        token = story_from(request(name, prompt=6, max_tokens=9), 9).tokens[start]
        return RunStep(StepPlan(2, decodes=(Decode(name, token, start, KvForm(blocks), self.A.sampling, index),)))

    def test_a_step_takes_time_for_each_token(self) -> None:
        plan = replace(self.decode((0, 1)).plan, chunks=(self.PROMPT,))
        assert Costs(step_s=1.0, token_s=0.5, prefix_token_s=0.0).step(plan) == 1.0 + 7 * 0.5

    def test_the_right_prefix_runs(self, engine: CheckedHands) -> None:
        engine.finish(self.decode((0, 1)), 0.0)

    @pytest.mark.parametrize(
        ("blocks", "start", "index", "name"),
        [((1, 0), 6, 1, "a"), ((2, 3), 6, 1, "a"), ((0, 1), 7, 2, "a"), ((0, 1), 6, 2, "a"), ((0, 1), 6, 1, "b")],
        ids=["blocks in another order", "blocks of nobody", "a hole", "another index", "KV of another request"],
    )
    def test_anything_else_does_not(
        self, engine: CheckedHands, blocks: tuple[int, ...], start: int, index: int, name: str
    ) -> None:
        with pytest.raises(WrongKV):
            engine.finish(self.decode(blocks, start, index, name), 0.0)

    @pytest.mark.parametrize("first", [None, 999], ids=["no history", "another one"])
    def test_nor_does_a_token_with_another_history(self, engine: CheckedHands, first: int | None) -> None:
        said = story_from(self.A, 9).output[:1]
        (decode,) = self.decode((0, 1)).plan.decodes
        sampling = Sampling(presence_penalty=1.0)
        wrong = None if first is None else History(self.A.prompt, [first], self.A.stop_tokens)
        right = History(self.A.prompt, [*said, 5, 6], self.A.stop_tokens)  # the history's list has grown meanwhile
        for history in (right, wrong):
            step = RunStep(StepPlan(2, decodes=(replace(decode, sampling=sampling, history=history),)))
            if history is right:
                engine.finish(step, 0.0)
                continue
            with pytest.raises(WrongKV, match="history that is not its own"):
                engine.finish(step, 0.0)

    def test_nor_are_other_tokens_scored(self, engine: CheckedHands) -> None:
        for follow, is_right in (((2, 3, 4, 5, 6), True), ((3, 4, 5, 6), False), ((1, 2, 3, 4, 5, 6), False)):
            step = RunStep(StepPlan(2, (replace(self.PROMPT, scoring=Scoring(follow, 0)),)))
            if is_right:
                engine.finish(step, 0.0)
                continue
            with pytest.raises(WrongKV, match="scored"):
                engine.finish(step, 0.0)

    def test_a_copy_is_intact_only_if_the_pages_hold_its_tokens(self, engine: CheckedHands, arena: TaggedArena) -> None:
        tokens = self.PROMPT.tokens
        engine.finish(CopyOut(1, "pool-0.1", (0, 1), (3,), tokens), 0.0)
        assert engine.finish(CopyIn(2, "pool-0.1", (3,), (2, 3), tokens), 0.0) == CopiedIn(2, intact=True)
        engine.finish(self.decode((2, 3)), 0.0)
        assert engine.finish(CopyIn(3, "pool-0.1", (2,), (2, 3), tokens), 0.0) == CopiedIn(3, intact=False)
        assert engine.finish(CopyIn(4, "pool-0.1", (3,), (2, 3), (*tokens, 7)), 0.0) == CopiedIn(4, intact=False)
        engine.begin(CopyOut(5, "pool-0.1", (0, 1), (3,), tokens))
        assert engine.finish(CopyIn(6, "pool-0.1", (3,), (2, 3), tokens), 0.0) == CopiedIn(6, intact=False)

    def test_a_copy_reaches_no_other_pool_than_it_names(self, engine: CheckedHands, arena: TaggedArena) -> None:
        tokens = self.PROMPT.tokens
        engine.part_from(POOL_MEMBER)
        engine.meet(member("pool-0", 2))
        early = CopyOut(1, "pool-0.1", (0, 1), (3,), tokens)
        engine.begin(early)
        assert engine.finish(early, 0.0) == CopiedOut(1)
        assert arena.pages == {}
        engine.finish(CopyOut(2, "pool-0.2", (0, 1), (3,), tokens), 0.0)
        assert engine.finish(CopyIn(3, "pool-0.1", (3,), (2, 3), tokens), 0.0) == CopiedIn(3, intact=False)
        assert engine.finish(CopyIn(4, "pool-0.2", (3,), (2, 3), tokens), 0.0) == CopiedIn(4, intact=True)
        engine.part_from(member("pool-0", 2))
        assert engine.finish(CopyIn(5, "pool-0.2", (3,), (2, 3), tokens), 0.0) == CopiedIn(5, intact=False)
