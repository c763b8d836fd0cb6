"""Tests of a peer in another process that is killed, or falls silent, in the middle of a transfer."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from signal import Signals
from typing import Any

import pytest
import torch

from alignedserve.protocol.commands import ReceiveKv, SendKv
from alignedserve.protocol.events import KvReceived, KvSent
from alignedserve.protocol.messages import Member
from alignedserve.transport import payload
from tests.transport.conftest import MakeNode
from tests.transport.nodes import KEYS, Node
from tests.transport.peer import FORKS, be_peer

TOKENS = tuple(range(50, 61))
HERE, THERE = (4, 7, 1), (0, 11, 6)


class Peer:
    def __init__(self, name: str, incarnation: int, shared: Path | None) -> None:
        self._link, its_link = FORKS.Pipe()
        self._process = FORKS.Process(target=be_peer, args=(name, incarnation, shared, KEYS, its_link), daemon=True)
        self._process.start()
        its_link.close()

    @cached_property
    def member(self) -> Member:
        member: Member = self.heard()
        return member

    def heard(self) -> Any:
        return self._link.recv()

    def tell(self, order: Member | SendKv | ReceiveKv | str) -> None:
        self._link.send(order)

    def signal(self, number: Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._link.close()


@pytest.fixture
def lives(shared: Path | None) -> Iterator[list[Peer]]:
    """Yield three incarnations of one worker, to be used in turn."""
    with ExitStack() as peers:
        started = [Peer("decode-0", incarnation, shared) for incarnation in (1, 2, 3)]
        for peer in started:
            peers.callback(peer.end)
        assert [peer.member.holder for peer in started] == ["decode-0.1", "decode-0.2", "decode-0.3"]
        yield started


@pytest.fixture
def memories(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[memoryview]]:
    """Return a list that gets a reference to the memory of every chunk of this process."""
    taken: list[weakref.ref[memoryview]] = []
    take = payload._memory

    def noting(num_bytes: int) -> memoryview:
        memory = take(num_bytes)
        taken.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(payload, "_memory", noting)
    monkeypatch.setattr(payload, "CHUNK_BYTES", 1)  # one chunk per token
    return taken


def meet(node: Node, peer: Peer) -> None:
    node.transport.meet(peer.member)
    peer.tell(node.member)


def arrives(node: Node, peer: Peer, number: int) -> None:
    """Check a transfer there, and back to other blocks."""
    node.start(SendKv(number, peer.member.holder, HERE, TOKENS))
    peer.tell(ReceiveKv(number, node.holder, THERE, TOKENS))
    assert node.outcome() == KvSent(number, peer.member.holder, ok=True)
    assert peer.heard() == KvReceived(number, node.holder, intact=True)
    peer.tell(SendKv(number, node.holder, THERE, TOKENS))
    node.start(ReceiveKv(number, peer.member.holder, THERE, TOKENS))
    assert node.outcome() == KvReceived(number, peer.member.holder, intact=True)
    assert peer.heard() == KvSent(number, node.holder, ok=True)
    assert torch.equal(node.of(THERE, len(TOKENS)), node.of(HERE, len(TOKENS)))


def test_peers_that_are_killed_or_stopped_in_mid_transfer(
    node_of: MakeNode, lives: list[Peer], memories: list[weakref.ref[memoryview]], shared: Path | None
) -> None:
    """Run three lives of one decode worker in one test, since each step needs the state that earlier steps left."""
    first, second, third = lives
    node = node_of("prefill-0")
    meet(node, first)
    arrives(node, first, 1)
    there = first.member.holder
    first.tell("scatter" if shared is None else "copy")
    for number in (2, 3):
        node.start(SendKv(number, there, HERE, TOKENS))
    first.tell(ReceiveKv(2, node.holder, THERE, TOKENS))
    assert first.heard() == "touched"
    first.signal(signal.SIGKILL)
    assert [node.outcome() for _ in "23"] == [KvSent(number, there, ok=False) for number in (2, 3)]
    node.transport.part_from(first.member)

    meet(node, second)
    arrives(node, second, 1)
    there = second.member.holder
    second.signal(signal.SIGSTOP)
    with node.hurried():
        node.start(SendKv(2, there, HERE, TOKENS))
        assert node.outcome() == KvSent(2, there, ok=False), "after a time-out"
    second.signal(signal.SIGCONT)
    second.tell(ReceiveKv(2, node.holder, THERE, TOKENS))
    assert second.heard() == KvReceived(2, node.holder, intact=False)
    arrives(node, second, 3)
    second.tell("gather")
    for number in (4, 5):
        node.start(ReceiveKv(number, there, THERE, TOKENS))
    second.tell(SendKv(4, node.holder, HERE, TOKENS))
    assert second.heard() == "touched"
    second.signal(signal.SIGKILL)
    assert [node.outcome() for _ in "45"] == [KvReceived(number, there, intact=False) for number in (4, 5)]
    node.transport.part_from(second.member)

    meet(node, third)
    arrives(node, third, 1)
    assert node.transport.num_failed == 5
    gc.collect()
    assert len(memories) > 10
    assert [memory() for memory in memories] == [None] * len(memories)
