"""Tests that KV arrives in another worker's blocks, bit for bit, or that the event says that it did not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroupGloo

from alignedserve.engine.device import groups
from alignedserve.errors import PlanError
from alignedserve.kernels.common.placing import on_device
from alignedserve.kernels.common.spans import slots_of
from alignedserve.protocol.commands import ReceiveKv, SendKv
from alignedserve.protocol.events import KvReceived, KvSent
from alignedserve.protocol.roads import Road, road_between
from alignedserve.transport import frames, payload
from alignedserve.transport.payload import DeviceBlocks
from alignedserve.transport.turns import Communicators
from tests.transport.conftest import MakeNode
from tests.transport.nodes import BITS, BLOCK_SIZE, DEADLINE_S, HOST, NUM_BLOCKS, Node, meet, random_cache

TOKENS = tuple(range(100, 111))
HERE, THERE = (5, 2, 8), (9, 3, 1)
NEVER_S = 3600.0  # a wait that would exceed the test's time limit


def order(source: Node, to: Node, number: int, tokens: tuple[int, ...] = TOKENS) -> tuple[SendKv, ReceiveKv]:
    return SendKv(number, to.holder, HERE, tokens), ReceiveKv(number, source.holder, THERE, tokens)


def arrives(source: Node, to: Node, number: int) -> bool:
    """Run a transfer that both ends are told of, and return whether the bytes arrived."""
    send, receive = order(source, to, number)
    source.start(send)
    to.start(receive)
    assert source.outcome() == KvSent(number, to.holder, ok=True)
    assert to.outcome() == KvReceived(number, source.holder, intact=True)
    return torch.equal(to.of(THERE, len(TOKENS)), source.of(HERE, len(TOKENS)))


def test_a_worker_has_a_road_for_each_peer(shared: Path | None, node_of: MakeNode) -> None:
    """It maps the memory of those on its machine, and sends to others; without memory to map it sends to all."""
    also_sends = shared is not None
    source, near, far = (
        node_of(name, also_sends=also_sends, on_machine=machine)
        for name, machine in (("prefill-0", "here"), ("decode-0", "here"), ("decode-1", "there"))
    )
    meet(source, near, far)
    roads = [road_between(source.member, to.member) for to in (near, far)]
    assert roads == [Road.IPC if also_sends else Road.COLLECTIVE, Road.COLLECTIVE]
    assert arrives(source, near, 1)
    assert arrives(source, far, 2)
    assert arrives(near, source, 3)
    assert source.transport.num_failed == 0


# --- Every byte

Plan: TypeAlias = tuple[int, int]  # number and tokens of a transfer


@dataclass(frozen=True)
class Case:
    """Transfers of one direction, and in which order the two ends are told of them."""

    dtype: torch.dtype
    lengths: tuple[int, ...]
    told: tuple[bool, ...]  # per notice: true if it goes to the source, false if to the receiver
    seed: int

    def blocks(self, seed: int) -> list[tuple[int, ...]]:
        """Return the blocks of each transfer; no block appears twice."""
        free = random.Random(seed).sample(range(NUM_BLOCKS), NUM_BLOCKS)
        return [tuple(free.pop() for _ in range(-(-length // BLOCK_SIZE))) for length in self.lengths]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lengths = draw(st.lists(st.integers(1, 6 * BLOCK_SIZE), min_size=1, max_size=5).map(tuple))
    count = len(lengths)
    return Case(
        draw(st.sampled_from([*BITS])),
        lengths,
        tuple(draw(st.permutations([True] * count + [False] * count))),
        draw(st.integers(0, 99)),
    )


@pytest.fixture(scope="module")
def couples(shared: Path | None) -> Iterator[dict[torch.dtype, tuple[Node, Node]]]:
    """Yield nodes that live from one example to the next, as do their connections."""
    lives = {dtype: number for number, dtype in enumerate(BITS, 100)}
    made = {
        dtype: (
            Node("prefill-0", dtype, shared=shared, incarnation=life),
            Node("decode-0", dtype, shared=shared, incarnation=life),
        )
        for dtype, life in lives.items()
    }
    for couple in made.values():
        meet(*couple)
    yield made
    for couple in made.values():
        for node in couple:
            node.transport.close()


NUMBERS = iter(range(1, 1 << 30))


@given(case=cases())
@settings(deadline=None, max_examples=25)
def test_any_transfers_whoever_is_told_first(couples: dict[torch.dtype, tuple[Node, Node]], case: Case) -> None:
    couple = couples[case.dtype]
    source, to = couple if case.seed % 2 else couple[::-1]
    untouched = to.cache.clone().view(BITS[case.dtype])
    plans = list(zip((next(NUMBERS) for _ in case.lengths), case.lengths, strict=False))
    here, there = case.blocks(case.seed), case.blocks(case.seed + 1)
    sends = [SendKv(n, to.holder, at, tuple(range(m))) for (n, m), at in planned(plans, here)]
    receives = [ReceiveKv(n, source.holder, at, tuple(range(m))) for (n, m), at in planned(plans, there)]
    for is_source in case.told:
        if is_source:
            source.start(sends.pop(0))
        else:
            to.start(receives.pop(0))
    assert [source.outcome() for _ in plans] == [KvSent(number, to.holder, ok=True) for number, *_ in plans]
    assert [to.outcome() for _ in plans] == [KvReceived(number, source.holder, intact=True) for number, *_ in plans]
    for length, sent, arrived in zip(case.lengths, here, there, strict=True):
        assert torch.equal(to.of(arrived, length), source.of(sent, length))
    free_blocks = [block for block in range(NUM_BLOCKS) if not any(block in blocks for blocks in there)]
    of_others = [2 * block + half for block in free_blocks for half in (0, 1)]
    assert torch.equal(to.cache.view(BITS[case.dtype])[:, of_others], untouched[:, of_others])


def planned(plans: list[Plan], blocks: list[tuple[int, ...]]) -> Iterator[tuple[Plan, tuple[int, ...]]]:
    return zip(plans, blocks, strict=True)


def test_many_chunks(both: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "CHUNK_BYTES", 1)  # one chunk per token
    source, to = both
    assert arrives(source, to, 1)
    assert arrives(to, source, 1), "the other way"


class OverGloo:
    """Carries chunks as a communicator of NCCL does, but over Gloo, which meets by the pair's store as NCCL does."""

    device, asks_first = torch.device("cpu"), True
    made: ClassVar[list[OverGloo]] = []

    def __init__(self, store: Store, rank: int) -> None:
        gloo: Any = ProcessGroupGloo  # torch does not declare all of its attributes
        options = gloo._Options()
        options._devices, options._timeout = [gloo.create_device(hostname=HOST)], timedelta(seconds=DEADLINE_S)
        self._store, self._gloo, self._peer = store, gloo(store, rank, 2, options), 1 - rank
        self.made.append(self)

    def send(self, data: torch.Tensor, tag: int) -> groups.Flight:
        return groups.Flight(self._gloo.send([data], self._peer, tag).wait)

    def receive(self, into: torch.Tensor, tag: int) -> groups.Flight:
        return groups.Flight(self._gloo.recv([into], self._peer, tag).wait)

    def close(self) -> None:
        """A group that two processes share would end its waits here; none waits in these tests."""


@pytest.fixture
def communicating(node_of: MakeNode) -> Iterator[Callable[..., Node]]:
    """Return a function that makes workers whose chunks go over communicators."""
    OverGloo.made.clear()
    yield lambda name, **kwargs: node_of(name, communicators=Communicators(OverGloo), **kwargs)
    OverGloo.made.clear()


@pytest.mark.parametrize("shared", ["collective"], indirect=True)
@pytest.mark.parametrize("verify", [True, False])
def test_a_pair_has_one_communicator_for_both_directions(
    communicating: Callable[..., Node], verify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver asks for the chunks beyond the window."""
    monkeypatch.setattr(payload, "CHUNK_BYTES", 1)
    source, to = communicating("prefill-0", verify=verify), communicating("decode-0", verify=verify)
    meet(source, to)
    assert len(TOKENS) > payload.WINDOW
    assert arrives(source, to, 1)
    assert arrives(to, source, 1), "the other way"
    assert arrives(source, to, 2)
    assert len(OverGloo.made) == 2, "one at each end"


def test_numbers_of_blocks_are_uploaded_once_a_transfer(
    node_of: MakeNode,
    communicating: Callable[..., Node],
    shared: Path | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its chunks take parts of them: two uploads by the receiver that maps the source's blocks, one at either end
    where chunks go over a communicator. A CPU has nothing to upload, and asks all the same."""
    uploaded, used = list[torch.Tensor](), list[torch.Tensor]()

    def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        uploaded.append(on_device(tensor, device))
        return uploaded[-1]

    def seen(touch: Callable[..., Any]) -> Callable[..., Any]:
        def touching(*args: Any, **kwargs: Any) -> Any:
            used.extend(each for each in args if isinstance(each, torch.Tensor) and each.dtype is torch.long)
            return touch(*args, **kwargs)

        return touching

    monkeypatch.setattr(payload, "CHUNK_BYTES", 1)
    monkeypatch.setattr(payload, "on_device", upload)
    for name in ("gather", "scatter", "copy"):
        monkeypatch.setattr(DeviceBlocks, name, seen(getattr(DeviceBlocks, name)))
    make = communicating if shared is None else node_of
    source, to = make("prefill-0", verify=False), make("decode-0", verify=False)
    meet(source, to)
    assert arrives(source, to, 1)
    ends = [torch.tensor(blocks) for blocks in (HERE, THERE)]
    if shared is None:
        ends = [slots_of(blocks, BLOCK_SIZE)[: len(TOKENS)] for blocks in ends]
    assert sorted(each.tolist() for each in uploaded) == sorted(each.tolist() for each in ends)
    assert len(used) == 2 * (len(TOKENS) if shared is None else len(HERE)), "several chunks"
    of_uploads = {each.untyped_storage().data_ptr() for each in uploaded}
    assert {each.untyped_storage().data_ptr() for each in used} == of_uploads


@pytest.mark.parametrize("shared", ["collective"], indirect=True)
def test_transfers_in_a_circle_of_workers_all_arrive(communicating: Callable[..., Node]) -> None:
    """Each sends to the next one and receives from the one before, all at once, and back."""
    nodes = [communicating(name) for name in ("prefill-0", "decode-0", "prefill-1", "decode-1")]
    meet(*nodes)
    for number in (1, 2, 3):
        for node, following in zip(nodes, (*nodes[1:], nodes[0]), strict=True):
            for source, to in ((node, following), (following, node)):
                send, receive = order(source, to, number)
                source.start(send)
                to.start(receive)
        for node in nodes:
            ends = [node.outcome() for _ in range(4)]
            assert all(end.ok if isinstance(end, KvSent) else end.intact for end in ends)
    assert len(OverGloo.made) == 2 * len(nodes)


@pytest.mark.parametrize("shared", ["collective"], indirect=True)
@pytest.mark.parametrize("broken_at", ["prefill-0", "decode-0"])
def test_a_communicator_that_broke_at_one_end_is_made_again_by_both(
    communicating: Callable[..., Node], broken_at: str
) -> None:
    source, to = communicating("prefill-0"), communicating("decode-0")
    meet(source, to)
    assert arrives(source, to, 1)
    node, peer = (source, to) if broken_at == source.name else (to, source)
    assert node.communicators is not None
    node.communicators.close(peer.holder)
    assert arrives(source, to, 2)
    assert arrives(to, source, 1)
    assert len(OverGloo.made) == 4


@pytest.mark.parametrize("shared", ["collective"], indirect=True)
def test_a_worker_carries_one_transfer_at_a_time(communicating: Callable[..., Node]) -> None:
    """While a worker's turn is taken, its next transfer waits, and fails when that takes too long."""
    source, to = communicating("prefill-0"), communicating("decode-0")
    meet(source, to)
    assert source.communicators is not None
    with source.communicators.turn(DEADLINE_S), source.hurried(), to.hurried():
        send, receive = order(source, to, 1)
        source.start(send)
        to.start(receive)
        assert source.outcome() == KvSent(1, to.holder, ok=False)
        assert to.outcome() == KvReceived(1, source.holder, intact=False)
    assert not OverGloo.made
    assert arrives(source, to, 2)


def turned(blocks: Sequence[int], from_right: set[int]) -> list[int]:
    return [~block if block in from_right else block for block in blocks]


def test_between_blocks_that_are_filled_from_either_end() -> None:
    """Each end has its own directions, which the other end need not know."""
    first, second = random_cache(1), random_cache(2)
    here, there = DeviceBlocks(first), DeviceBlocks(second)
    num_bytes = len(TOKENS) * here.token_bytes
    chunk = payload.ChunkBuffers(num_bytes).chunk(0, num_bytes)
    here.gather(here.slots(turned(HERE, {2}), len(TOKENS)), chunk, is_checked=False)
    there.scatter(there.slots(turned(THERE, {9, 1}), len(TOKENS)), chunk)
    for place, token in ((0, 0), (5, 5), (10, 10)):
        block, to_block = HERE[place // BLOCK_SIZE], THERE[place // BLOCK_SIZE]
        at, to = place % BLOCK_SIZE, place % BLOCK_SIZE
        at, to = (BLOCK_SIZE - 1 - at if block == 2 else at), (BLOCK_SIZE - 1 - to if to_block in (9, 1) else to)
        for half in (0, 1):
            sent = first.view(torch.int16)[:, 2 * block + half, at]
            assert torch.equal(second.view(torch.int16)[:, 2 * to_block + half, to], sent), token


def test_several_on_either_side(node_of: MakeNode) -> None:
    prefills, decodes = [node_of(f"prefill-{i}") for i in range(2)], [node_of(f"decode-{i}") for i in range(2)]
    meet(*prefills, *decodes)
    for source in prefills:
        for number, to in enumerate(decodes, 1):
            send, _ = order(source, to, number)
            source.start(send)
    for to in decodes:
        free = iter(range(NUM_BLOCKS))
        for source in prefills:
            blocks = tuple(next(free) for _ in THERE)
            to.start(ReceiveKv(1 + decodes.index(to), source.holder, blocks, TOKENS))
    for node in (*prefills, *decodes):
        for _ in range(2):
            outcome = node.outcome()
            assert outcome.ok if isinstance(outcome, KvSent) else outcome.intact
    for to in decodes:
        assert torch.equal(to.of((0, 1, 2), len(TOKENS)), prefills[0].of(HERE, len(TOKENS)))
        assert torch.equal(to.of((3, 4, 5), len(TOKENS)), prefills[1].of(HERE, len(TOKENS)))


# --- Transfers that differ from their announcement


def refused(source: Node, to: Node, send: SendKv, receive: ReceiveKv) -> None:
    """Check that the transfer is refused, leaves the receiver's blocks unchanged, and that the next transfer
    arrives."""
    before = to.cache.clone()
    source.start(send)
    to.start(receive)
    assert to.outcome() == KvReceived(receive.number, source.holder, intact=False)
    assert source.outcome() == KvSent(send.number, to.holder, ok=not send.blocks)
    assert torch.equal(to.cache.view(torch.int16), before.view(torch.int16))
    assert arrives(source, to, receive.number + 1)


def test_of_what_the_source_has_no_longer_it_says_so(both: tuple[Node, Node]) -> None:
    source, to = both
    refused(source, to, SendKv(1, to.holder, (), ()), order(source, to, 1)[1])


def test_other_tokens_are_refused(both: tuple[Node, Node]) -> None:
    source, to = both
    send, _ = order(source, to, 1)
    refused(source, to, send, ReceiveKv(1, source.holder, THERE, (99, *TOKENS[1:])))
    refused(source, to, SendKv(3, to.holder, HERE, TOKENS), ReceiveKv(3, source.holder, THERE, TOKENS[:-1]))


def test_unchecked_chunks_are_refused_by_a_receiver_that_checks(node_of: MakeNode) -> None:
    source, to = node_of("prefill-0", verify=False), node_of("decode-0", verify=True)
    meet(source, to)
    source.start(order(source, to, 1)[0])
    to.start(order(source, to, 1)[1])
    assert (to.outcome(), source.outcome()) == (
        KvReceived(1, source.holder, intact=False),
        KvSent(1, to.holder, ok=False),
    )


@pytest.mark.parametrize("place", [0, 8, -1])
@pytest.mark.parametrize("shared", ["collective"], indirect=True)
def test_a_chunk_that_was_changed_on_its_way_is_not_used(
    both: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    source, to = both
    send_whole = groups.Group.send

    def spoil(self: groups.Group, data: torch.Tensor, tag: int) -> groups.Flight:
        if tag == frames.CHUNK:
            data[place] ^= 1
        return send_whole(self, data, tag)

    with monkeypatch.context() as patched:
        patched.setattr(groups.Group, "send", spoil)
        send, receive = order(source, to, 1)
        source.start(send)
        to.start(receive)
        assert (source.outcome(), to.outcome()) == (
            KvSent(1, to.holder, ok=False),
            KvReceived(1, source.holder, intact=False),
        )
    assert arrives(source, to, 2)


def test_a_number_that_a_single_end_knows_is_left_out_by_both(both: tuple[Node, Node]) -> None:
    source, to = both
    source.start(order(source, to, 1)[0])
    to.start(order(source, to, 2)[1])
    assert source.outcome() == KvSent(1, to.holder, ok=False), "the receiver is past it"
    source.start(order(source, to, 2)[0])
    assert to.outcome() == KvReceived(2, source.holder, intact=True)
    assert source.outcome() == KvSent(2, to.holder, ok=True)
    to.start(order(source, to, 3)[1])
    source.start(order(source, to, 4)[0])
    assert to.outcome() == KvReceived(3, source.holder, intact=False), "the source is past it"
    to.start(order(source, to, 4)[1])
    assert to.outcome() == KvReceived(4, source.holder, intact=True)
    assert source.outcome() == KvSent(4, to.holder, ok=True)


def test_a_transfer_that_cannot_be_is_the_caller_s_fault(both: tuple[Node, Node]) -> None:
    source, to = both
    with pytest.raises(PlanError, match="2 blocks are too few"):
        source.start(SendKv(1, to.holder, (1, 2), TOKENS))
    with pytest.raises(PlanError, match=f"outside 0..{NUM_BLOCKS - 1}"):
        to.start(ReceiveKv(1, source.holder, (1, 2, NUM_BLOCKS), TOKENS))


def test_a_fault_of_our_own_is_told_and_harms_no_other_transfer(
    both: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, to = both

    def fail(*_: object) -> None:
        raise RuntimeError("the device is lost, or so")

    with monkeypatch.context() as patched:
        for name in ("scatter", "copy"):
            patched.setattr(DeviceBlocks, name, fail)
        send, receive = order(source, to, 1)
        source.start(send)
        to.start(receive)
        assert to.outcome() == KvReceived(1, source.holder, intact=False)
        assert source.outcome() == KvSent(1, to.holder, ok=False)
    assert to.faults.is_set()
    assert not source.faults.is_set()
    assert arrives(source, to, 2)


# --- The other end does not answer


def test_a_receiver_that_is_told_too_late_hears_at_once_that_it_is(node_of: MakeNode) -> None:
    source, to = node_of("prefill-0"), node_of("decode-0", timeout_s=NEVER_S)
    meet(source, to)
    with source.hurried():
        for number in (1, 2):
            source.start(order(source, to, number)[0])
        assert [source.outcome() for _ in "12"] == [KvSent(number, to.holder, ok=False) for number in (1, 2)]
    for number in (1, 2):
        to.start(order(source, to, number)[1])
        assert to.outcome() == KvReceived(number, source.holder, intact=False)
    assert source.transport.num_failed == to.transport.num_failed == 2
    assert arrives(source, to, 3)


def test_a_source_that_is_told_too_late_hears_at_once_that_it_is(node_of: MakeNode) -> None:
    source, to = node_of("prefill-0", timeout_s=NEVER_S), node_of("decode-0")
    meet(source, to)
    with to.hurried():
        to.start(order(source, to, 1)[1])
        assert to.outcome() == KvReceived(1, source.holder, intact=False)
    source.start(order(source, to, 1)[0])
    assert source.outcome() == KvSent(1, to.holder, ok=False)
    assert arrives(source, to, 2)


@pytest.mark.parametrize("is_late", ["source", "receiver"])
def test_the_same_once_they_are_connected(node_of: MakeNode, is_late: str) -> None:
    """The group breaks, and the next transfer uses a new group."""
    source, to = node_of("prefill-0", timeout_s=NEVER_S), node_of("decode-0", timeout_s=NEVER_S)
    meet(source, to)
    assert arrives(source, to, 1)
    send, receive = order(source, to, 2)
    if is_late == "source":
        with to.hurried():
            to.start(receive)
            assert to.outcome() == KvReceived(2, source.holder, intact=False)
        source.start(send)
        assert source.outcome() == KvSent(2, to.holder, ok=False)
    else:
        with source.hurried():
            source.start(send)
            assert source.outcome() == KvSent(2, to.holder, ok=False)
        to.start(receive)
        assert to.outcome() == KvReceived(2, source.holder, intact=False)
    assert arrives(source, to, 3)


def test_nothing_is_begun_with_an_unmet_member(both: tuple[Node, Node]) -> None:
    source, to = both
    source.start(SendKv(1, "decode-7.1", HERE, TOKENS))
    assert source.outcome() == KvSent(1, "decode-7.1", ok=False)
    to.start(ReceiveKv(1, "prefill-0.9", THERE, TOKENS))
    assert to.outcome() == KvReceived(1, "prefill-0.9", intact=False)


@pytest.mark.parametrize("connected", [True, False])
def test_a_lost_member_fails_all_that_is_outstanding_at_once(node_of: MakeNode, connected: bool) -> None:
    source, to = node_of("prefill-0", timeout_s=NEVER_S), node_of("decode-0", timeout_s=NEVER_S)
    meet(source, to)
    if connected:
        assert arrives(source, to, 1)
    for number in (2, 3):
        source.start(order(source, to, number)[0])
    source.transport.part_from(to.member)
    assert [source.outcome() for _ in "23"] == [KvSent(number, to.holder, ok=False) for number in (2, 3)]
    to.start(order(source, to, 4)[1])
    to.transport.part_from(source.member)
    assert to.outcome() == KvReceived(4, source.holder, intact=False)
    source.start(order(source, to, 5)[0])
    assert source.outcome() == KvSent(5, to.holder, ok=False), "it is not there any more"
    later = node_of("decode-0", incarnation=2)
    meet(source, later)
    assert arrives(source, later, 1)
