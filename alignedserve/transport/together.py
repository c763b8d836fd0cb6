"""Transfers of a worker with several ranks: each sends its part of the KV to the same rank of the other worker.

    rank 0    core ── SendKv ──▶ own transport ── its end ─────────┐
                  └── order ──▶ rank 1: own transport ── its end ──┴──▶ all have ended: one KvSent

All ranks begin with the same order (executor/leading.py). They tell rank 0 over a separate line how a transfer ended,
since transfers run beside the steps. A transfer succeeded if it succeeded on every rank.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import defaultdict
from collections.abc import Mapping
from typing import TypeAlias

from alignedserve.engine.device.rank_link import SHORT, RankLink
from alignedserve.engine.device.ranks import Team
from alignedserve.errors import RankLost
from alignedserve.protocol.commands import SendKv
from alignedserve.protocol.events import KvReceived, KvSent
from alignedserve.protocol.messages import Member
from alignedserve.protocol.rank_orders import decode_ended
from alignedserve.protocol.wire import pack
from alignedserve.transport.transport import Outcome, Post, Transfer, Transport

log = logging.getLogger("alignedserve.transport")

_Key: TypeAlias = tuple[bool, str, int]  # (whether it is sent, holder of the other worker, number)


def together(own: Transport, team: Team) -> Transport:
    """Join the transports of a worker's ranks; every rank calls this."""
    addresses = team.all_say(own.address)
    return OtherRank(own, team.told[0]) if team.rank else FirstRank(own, addresses, team.told)


class _RankTransport:
    """What the first rank's transport and the others' have in common."""

    def __init__(self, own: Transport) -> None:
        self._own = own

    @property
    def num_failed(self) -> int:
        return self._own.num_failed

    def meet(self, member: Member) -> None:
        self._own.meet(member)

    def part_from(self, member: Member) -> None:
        self._own.part_from(member)

    def close(self) -> None:
        self._own.close()


class FirstRank(_RankTransport):
    """The transport of rank 0, which stands for the worker."""

    def __init__(self, own: Transport, addresses: list[str], lines: Mapping[int, RankLink]) -> None:
        super().__init__(own)
        self.address, self._size = " ".join(addresses), len(addresses)
        self._changed = threading.Lock()
        self._posts: dict[_Key, Post] = {}
        self._ended: defaultdict[_Key, list[Outcome]] = defaultdict(list)
        for rank, line in lines.items():
            threading.Thread(target=self._listen, args=(rank, line), name=f"line-{rank}", daemon=True).start()

    def start(self, transfer: Transfer, post: Post) -> None:
        with self._changed:
            self._posts[_key_of(transfer)] = post
        self._own.start(transfer, self._end)

    def _listen(self, rank: int, line: RankLink) -> None:
        try:
            while True:
                self._end(decode_ended(line.hear(SHORT)))
        except RankLost as error:  # the next step will fail on that too
            log.info("rank %d does not answer any more: %s", rank, error)

    def _end(self, outcome: Outcome) -> None:
        key = _key_of(outcome)
        with self._changed:
            ended = self._ended[key]
            ended.append(outcome)
            if len(ended) < self._size:
                return
            del self._ended[key]
            post = self._posts.pop(key)
        post(next((end for end in ended if not _went_well(end)), outcome))


class OtherRank(_RankTransport):
    """The transport of another rank, which tells rank 0 how its transfers ended."""

    address = ""

    def __init__(self, own: Transport, line: RankLink) -> None:
        super().__init__(own)
        self._line = line
        self._ended: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        threading.Thread(target=self._tell, name="line", daemon=True).start()

    def start(self, transfer: Transfer, post: Post) -> None:
        self._own.start(transfer, self._ended.put)

    def _tell(self) -> None:
        try:
            while True:
                self._line.tell(pack(self._ended.get()))
        except RankLost as error:
            log.info("rank 0 does not listen any more: %s", error)


def _key_of(of: Transfer | Outcome) -> _Key:
    return (True, of.to, of.number) if isinstance(of, SendKv | KvSent) else (False, of.source, of.number)


def _went_well(outcome: Outcome) -> bool:
    return outcome.intact if isinstance(outcome, KvReceived) else outcome.ok
