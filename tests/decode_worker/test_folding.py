"""Tests of when decodes fold blocks behind the windows of some layers, and of what they hold then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.architectures.config import fold_of
from alignedserve.core import (
    AttentionPattern,
    Decode,
    Entry,
    Fold,
    FoldKv,
    KvForm,
    Sampling,
    ServiceClass,
    StepResult,
    units_for,
)
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.kvpool.state import PoolCore
from alignedserve.papers.names import SchedulerName
from alignedserve.protocol.commands import Command, CopyIn, CopyOut, RunStep, Send
from alignedserve.protocol.events import CopiedIn, CopiedOut, Event, MemberJoined, Received, StepDone
from alignedserve.protocol.extents import Extents
from alignedserve.protocol.messages import ROUTER, Commit, Kept, Message, Prefill, Prefix, Release
from alignedserve.scheduling.dues import promise
from alignedserve.scheduling.policy import Chunking, Policy
from alignedserve.worker.setup import WorkerSetup
from alignedserve.worker.step.blocks import NamedBlocks
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.windows import MOST_FOLDS
from tests.samples import LIMITS, POOL_MEMBER, member, request

DECODE_MEMBER = member("decode-0")
FOLD = Fold(AttentionPattern(window=20), blocks=3)
SIZE = LIMITS.block_size
SIZES = st.integers(1, 100)
SIGHTS = (
    st.builds(AttentionPattern, SIZES)
    | st.builds(AttentionPattern, st.none(), SIZES)
    | st.builds(AttentionPattern, SIZES, SIZES)
)
FOLDS = st.builds(Fold, SIGHTS, blocks=st.integers(2, 9))


@given(FOLDS, st.integers(0, 2000), st.sampled_from((1, 4, 16)))
def test_whole_groups_of_blocks_are_folded_and_none_that_is_read_still(fold: Fold, tokens: int, size: int) -> None:
    folded, group = fold.foldable(tokens, size), size * fold.blocks
    first_read = fold.sight.first_read(tokens)  # by the next token
    assert folded <= first_read < folded + group
    assert folded % group == 0


@given(FOLDS, st.integers(0, 2000), st.integers(0, 100), st.sampled_from((1, 4, 16)))
def test_what_is_spared_says_what_is_folded_and_how_many_blocks_are_held(
    fold: Fold, tokens: int, later: int, size: int
) -> None:
    folded = fold.foldable(tokens, size)
    spared = fold.spared(folded)
    assert fold.folded(spared) == folded
    held = folded // (size * fold.blocks) + units_for(tokens + later - folded, size)
    assert units_for(tokens + later - spared, size) == held


@given(SIGHTS, st.integers(0, 500))
def test_a_token_is_read_as_far_as_a_window_or_a_stretch_goes(sight: AttentionPattern, position: int) -> None:
    first = sight.first_read(position)
    of_window = [max(0, position - sight.window + 1)] if sight.window else []
    of_stretch = [position // sight.stretch * sight.stretch] if sight.stretch else []
    assert first == min(of_window + of_stretch)
    assert position - first < sight.most
    assert first <= sight.first_read(position + 1), "what is read no more is never read again"


@given(
    st.lists(
        st.sampled_from((None, AttentionPattern(8), AttentionPattern(12), AttentionPattern(None, 4))), max_size=24
    ),
    st.sampled_from((12, 13)),
)
def test_each_layer_that_reads_all_gets_as_much_room_and_no_layer_gives_it_twice(
    sights: list[AttentionPattern | None], positions: int
) -> None:
    layers = fold_of(sights, positions)
    whole = [layer for layer, sight in enumerate(sights) if sight is None]
    narrow = len(sights) - len(whole)
    if layers is None:
        assert not whole or narrow < len(whole) or AttentionPattern(12) in sights
        return
    assert [*layers.rooms] == whole
    assert layers.fold.blocks == 1 + narrow // len(whole)
    rooms = [room for of_layer in layers.rooms.values() for room in of_layer]
    assert len({*rooms}) == len(rooms) == layers.fold.blocks * len(whole)
    assert all(of_layer[0] == layer for layer, of_layer in layers.rooms.items())
    assert all(sights[room] is not None for of_layer in layers.rooms.values() for room in of_layer[1:])


@given(st.lists(SIGHTS, min_size=1, max_size=5), st.integers(0, 2000))
def test_nothing_is_folded_that_any_layer_reads(sights: list[AttentionPattern], position: int) -> None:
    layers = fold_of([*sights, None], 10**9)
    assert layers is not None
    assert layers.fold.sight.first_read(position) <= min(sight.first_read(position) for sight in sights)


class Worker:
    """A decode worker that runs prompts too, and whose steps end at once."""

    def __init__(self, policy: Policy | None = None, num_blocks: int = 100) -> None:
        limits = replace(LIMITS, num_blocks=num_blocks, max_step_tokens=64, max_batch=4, fold=FOLD)
        self.core = decode_core(WorkerSetup(limits, policy or Policy()))
        self.folds: list[FoldKv] = []
        self._step: RunStep | None = None
        self.now = 0.0

    def ask(self, name: str, prompt: int, output: int, first: int = 1, service: ServiceClass = ServiceClass.RT) -> None:
        """Ask for the output of a prompt that counts on from a first token."""
        tokens = tuple(range(first, first + prompt))
        asked = replace(request(name, prompt, output), prompt=tokens, service=service)
        self.hears(Received(ROUTER, Prefill(asked), 1))

    def hears(self, event: Event) -> None:
        self._hear(self.core.handle(event, self.now))

    def steps(self, count: int) -> list[list[Command]]:
        said = []
        for _ in range(count):
            assert self._step is not None
            plan, self.now = self._step.plan, self.now + 0.01
            sampled = tuple((part.request, 5) for part in plan.parts if part.sampling is not None)
            said.append(self.core.handle(StepDone(StepResult(plan.number, sampled), 0.01), self.now))
            self._hear(said[-1])
        return said

    def _hear(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, RunStep):
                self._step = command
            if isinstance(command, FoldKv):
                self.folds.append(command)

    def named(self, name: str) -> WorkerRequest:
        return self.core.here.residents[name]


class WithPool(Worker):
    """A decode worker beside a pool; copies end at once, and the pool answers at once, or when it is let."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks=num_blocks)
        self.pool, self.copies = PoolCore(Extents(200), SIZE), list[CopyOut | CopyIn]()
        self.commits, self.releases = list[Entry](), list[Release]()
        self.holds_back: type | None = None  # answers of the pool that are said later
        self.held_back: list[Event] = []
        self.pool.handle(MemberJoined(DECODE_MEMBER), 0.0)
        self.hears(MemberJoined(POOL_MEMBER))

    def _hear(self, commands: Sequence[Command]) -> None:
        super()._hear(commands)
        for command in commands:
            match command:
                case CopyOut(number):
                    self.copies.append(command)
                    self.hears(CopiedOut(number))
                case CopyIn(number):
                    self.copies.append(command)
                    self.hears(CopiedIn(number, intact=True))
                case Send(POOL_MEMBER.name, message):
                    self._tell_pool(message)

    def _tell_pool(self, message: Message) -> None:
        self.commits += [message.entry] if isinstance(message, Commit) else []
        self.releases += [message] if isinstance(message, Release) else []
        for answer in self.pool.handle(Received(DECODE_MEMBER.name, message, 1), self.now):
            if isinstance(answer, Send) and answer.to == DECODE_MEMBER.name:
                event = Received(POOL_MEMBER.name, answer.message, 1)
                if self.holds_back is not None and isinstance(answer.message, self.holds_back):
                    self.held_back.append(event)
                else:
                    self.hears(event)


def test_a_prompt_keeps_all_until_it_is_through_and_then_folds_a_part_after_each_step() -> None:
    worker = Worker()
    prompt = SIZE * FOLD.blocks * (MOST_FOLDS + 2) + FOLD.sight.most
    worker.ask("long", prompt, 40)
    while "long" not in worker.core.here.residents:
        assert not worker.folds
        worker.steps(1)
    assert [len(command.folds) for command in worker.folds] == [MOST_FOLDS]
    worker.steps(1)
    assert [len(command.folds) for command in worker.folds] == [MOST_FOLDS, 2]
    running = worker.named("long")
    assert running.kv.folded == FOLD.foldable(running.prefix, SIZE)
    assert len(running.blocks) == units_for(running.num_held + 1, SIZE)


def test_blocks_are_folded_before_anything_else_is_ordered_and_old_blocks_come_free() -> None:
    worker = Worker(Policy(reuse=False))
    worker.ask("r", FOLD.sight.most + FOLD.blocks * SIZE - 3, 30)
    while not worker.folds:
        (said,) = worker.steps(1)
    assert said[0] is worker.folds[0]
    ((into, *old),) = worker.folds[0].folds
    assert len(old) == FOLD.blocks
    assert worker.named("r").blocks[0] == into
    assert not {*old} & {*worker.named("r").blocks}
    assert worker.core.memory.num_free == 100 - len(worker.named("r").blocks)


@pytest.mark.parametrize(
    "policy", [Policy(reuse=False), Policy(SchedulerName.APT_SERVE, Chunking.FIXED, memory="weighed")]
)
def test_where_nothing_is_shared_and_where_a_knapsack_chooses_blocks_are_folded(policy: Policy) -> None:
    worker = Worker(policy)
    worker.ask("r", 100, 10)
    worker.steps(4)
    assert worker.folds


def test_a_beginning_with_two_readers_stays_as_it_is() -> None:
    worker = Worker()
    worker.ask("a", 30, 60)
    worker.ask("b", 30, 30)
    worker.steps(20)
    assert FOLD.foldable(worker.named("a").prefix, SIZE) > 0
    assert not worker.folds
    while "b" in worker.core.here.residents:
        worker.steps(1)
    worker.steps(2)
    assert worker.named("a").kv.folded


def test_pages_for_the_pool_are_awaited_unless_memory_is_short() -> None:
    worker = Worker()
    worker.ask("a", 100, 40)
    worker.hears(MemberJoined(POOL_MEMBER))
    worker.steps(8)
    assert worker.named("a").prefix > 100
    assert not worker.folds, "the pool has leased no pages yet"
    worker.ask("b", 310, 5)
    worker.hears(Received(POOL_MEMBER.name, Prefix("b", 0, ()), POOL_MEMBER.incarnation))
    worker.steps(2)
    assert worker.named("a").kv.folded


def test_a_beginning_that_others_read_is_folded_as_soon_as_what_follows_brings_more() -> None:
    worker = Worker()
    beginning = tuple(range(1, 1 + 2 * FOLD.blocks * SIZE))
    for name in ("a", "b"):
        asked = replace(request(name, max_tokens=80), prompt=(*beginning, ord(name)))
        worker.hears(Received(ROUTER, Prefill(asked), 1))
    while not worker.folds:
        worker.steps(1)
    assert worker.core.memory.pages.num_shared_tokens == len(beginning)
    # Of three groups three blocks come free, and three are taken: of four six come free.
    assert FOLD.foldable(worker.named("a").prefix, SIZE) == 4 * FOLD.blocks * SIZE
    worker.steps(6)
    for name in ("a", "b"):
        assert worker.named(name).kv.folded == FOLD.foldable(worker.named(name).prefix, SIZE)
    while worker.core.here.num_seated:
        worker.steps(1)
    assert worker.core.memory.num_free == 100


def test_a_folded_request_whose_prompt_the_pool_has_goes_there_when_it_has_to_leave() -> None:
    worker = WithPool(num_blocks=45)
    worker.ask("a", 120, 60, service=ServiceClass.BE)
    while not worker.folds:
        worker.steps(1)
    worker.ask("b", 140, 5, first=500)
    while not worker.commits:
        worker.steps(1)
    (left,), (*_, copy) = worker.commits, worker.copies
    start = 120 // LIMITS.page_size * LIMITS.page_size
    assert isinstance(copy, CopyOut)
    assert left.dropped == 0
    assert (copy.start, copy.tokens) == (start, left.request.prompt + left.output[:-1])
    assert copy.pages == left.pages[start // LIMITS.page_size :]
    written, not_written = copy.blocks[start // SIZE :], copy.blocks[: start // SIZE]
    assert len({*not_written}) < len(not_written), "a folded block stands in the place of several"
    assert len({*written} - {*not_written}) == len(written)


def test_a_folded_request_that_the_pool_has_less_of_is_computed_anew_from_there_on() -> None:
    worker = WithPool(num_blocks=45)
    worker.ask("a", 60, 120, service=ServiceClass.BE)
    while not worker.folds or worker.named("a").kv.folded <= 60:
        worker.steps(1)
    worker.ask("b", 140, 5, first=500)
    while not (fetched := [copy for copy in worker.copies if isinstance(copy, CopyIn)]):
        worker.steps(1)
    assert not worker.commits
    assert len(fetched[0].tokens) == 60 // LIMITS.page_size * LIMITS.page_size


def test_what_the_pool_keeps_stays_kept_for_a_request_that_has_folded_before_it_heard_of_it() -> None:
    worker = WithPool(num_blocks=100)
    worker.holds_back = Kept
    worker.ask("a", 120, 40)
    while not worker.folds:
        worker.steps(1)
    (kept,) = worker.held_back
    worker.hears(kept)
    assert not worker.releases
    assert len(worker.named("a").known) == 120 // LIMITS.page_size


def test_the_answer_of_a_request_that_has_folded_is_kept_for_others() -> None:
    worker = WithPool(num_blocks=100)
    worker.ask("a", 120, 25)
    while worker.core.here.num_seated or worker.core.queue.waiting:
        worker.steps(1)
    assert worker.folds
    assert len(worker.copies[-1].tokens) == (120 + 25 - 1) // LIMITS.page_size * LIMITS.page_size


def test_a_step_in_flight_is_known_by_its_last_block_after_blocks_were_folded() -> None:
    asked = request("a", max_tokens=50)
    here = WorkerRequest(asked, promise(asked, Policy()), [7], KvForm((9, 4, 5), 8, 12), 20)
    planned = Decode("a", 1, 19, KvForm((1, 2, 3, 4, 5)), Sampling(), 0)
    assert here.is_at(planned)
    assert here.is_at(replace(planned, kv=KvForm((9, 4, 5), 8)))
    assert not here.is_at(replace(planned, kv=KvForm((1, 2, 3, 4, 6))))
    assert not here.is_at(replace(planned, kv=KvForm((9, 4, 6), 8)))


def test_folded_pages_get_no_name_and_those_after_them_do() -> None:
    store = NamedBlocks(8)
    blocks = store.take(6)
    assert blocks is not None
    store.publish((10, 11, 12, 13), blocks[:4])
    store.give(blocks[:3])
    store.publish((10, 11, 12, 13, 14), (blocks[5], blocks[3], blocks[4]), num_dropped=2, num_folded=3)
    assert store.find((10, 11, 12, 13, 14)) == 5
    assert store.take(5) is not None, "idle pages go"
    store.publish((10, 11, 12, 13, 14), (blocks[5], blocks[3], blocks[4]), num_dropped=2, num_folded=3)
    assert store.find((10, 11, 12, 13, 14)) == 0


@pytest.mark.parametrize(("window", "blocks"), [(0, 2), (4, 1)])
def test_a_fold_that_spares_nothing_is_none(window: int, blocks: int) -> None:
    with pytest.raises(AssertionError, match="nothing comes free"):
        Fold(AttentionPattern(window), blocks)
