"""Tests of workers of two ranks: each rank sends to the same rank of the other worker, and the core gets one event."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pytest
import torch

from alignedserve.engine.device.ranks import Team
from alignedserve.protocol.commands import ReceiveKv, SendKv
from alignedserve.protocol.events import KvReceived, KvSent
from alignedserve.protocol.messages import Member
from alignedserve.transport.together import together
from alignedserve.transport.transport import Outcome, Transport
from tests.teams import teams
from tests.transport.conftest import MakeNode
from tests.transport.nodes import DEADLINE_S, Node
from tests.transport.test_transfers import HERE, THERE, TOKENS, order


@dataclass
class Worker:
    ranks: list[Node]
    transports: list[Transport]
    teams: list[Team]  # a team ends with its last reference, which must be here
    outcomes: queue.Queue[Outcome] = field(default_factory=queue.Queue)

    @property
    def member(self) -> Member:
        return replace(self.ranks[0].member, transport=self.transports[0].address)

    def meet(self, other_worker: Worker) -> None:
        for transport in self.transports:
            transport.meet(other_worker.member)

    def start(self, transfer: SendKv | ReceiveKv) -> None:
        for transport in self.transports:
            transport.start(transfer, self.outcomes.put)

    def outcome(self) -> Outcome:
        return self.outcomes.get(timeout=DEADLINE_S)


@pytest.fixture
def pair(node_of: MakeNode) -> Iterator[tuple[Worker, Worker]]:
    with ThreadPoolExecutor(2) as pool:

        def worker(name: str) -> Worker:
            ranks, both = [node_of(name, rank=rank) for rank in range(2)], teams(2)
            return Worker(ranks, list(pool.map(together, [rank.transport for rank in ranks], both)), both)

        source, to = worker("prefill-0"), worker("decode-0")
        source.meet(to)
        to.meet(source)
        yield source, to


def test_each_rank_gets_what_is_its_own_and_it_is_said_once(pair: tuple[Worker, Worker]) -> None:
    source, to = pair
    for number, (sender, receiver) in enumerate(((source, to), (to, source)), 1):
        send, receive = order(sender.ranks[0], receiver.ranks[0], number)
        receiver.start(receive)
        sender.start(send)
        assert sender.outcome() == KvSent(number, receiver.ranks[0].holder, ok=True)
        assert receiver.outcome() == KvReceived(number, sender.ranks[0].holder, intact=True)
        for rank in range(2):
            got, sent = receiver.ranks[rank].of(THERE, len(TOKENS)), sender.ranks[rank].of(HERE, len(TOKENS))
            assert torch.equal(got, sent)
        assert sender.outcomes.empty()
        assert receiver.outcomes.empty()
    assert not torch.equal(*(rank.of(HERE, len(TOKENS)) for rank in source.ranks)), "they have different parts"


@pytest.mark.parametrize("shared", ["collective"], indirect=True)
def test_kv_that_did_not_come_on_a_rank_has_not_come(pair: tuple[Worker, Worker]) -> None:
    """The receiver's second rank gets its order too late."""
    source, to = pair
    send, receive = order(source.ranks[0], to.ranks[0], 1)
    with source.ranks[1].hurried():
        source.start(send)
        to.transports[0].start(receive, to.outcomes.put)
        assert source.outcome() == KvSent(1, to.ranks[0].holder, ok=False)
    assert to.outcomes.empty(), "one is still to end"
    to.transports[1].start(receive, to.outcomes.put)
    assert to.outcome() == KvReceived(1, source.ranks[0].holder, intact=False)
