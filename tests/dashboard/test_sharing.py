"""The requests of all owners reach the page, whichever gateway shows it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import uvloop

from alignedserve.core import ServiceClass
from alignedserve.dashboard.sharing import RequestPictures
from alignedserve.metrics.recent import SLOT_S, Counts, RecentRequests, RequestLog, Slot
from alignedserve.owner.siblings import Siblings
from tests.gateway.conftest import PATIENT_S
from tests.owner.test_siblings import NAMES, sockets_in


def owner(number: int, folder: Path, tokens: int) -> RequestPictures:
    log = RequestLog()
    log.tokens[ServiceClass.BE].num += tokens
    log.tick(1.0)
    log.tokens[ServiceClass.BE].num += 10 * tokens
    log.tick(71.0)

    async def say(slot_s: bytes) -> bytes:
        return msgspec.json.encode(log.recent(80.0, float(slot_s)))

    told = Siblings(NAMES[number], sockets_in(folder), say, PATIENT_S)
    return RequestPictures(log, lambda: 20.0, told)


def test_owners_that_are_there_are_added_up(tmp_path: Path) -> None:
    async def shown(slot_s: float) -> RecentRequests:
        first, second = owner(0, tmp_path, 3), owner(1, tmp_path, 4)  # the third owner has not started
        async with first.listening(), second.listening():
            return await asyncio.wait_for(second.of_all(slot_s), PATIENT_S)

    assert uvloop.run(shown(SLOT_S)) == RecentRequests((Slot(0, be=Counts(tokens=7)), Slot(7, be=Counts(tokens=70))))
    assert uvloop.run(shown(40.0)) == RecentRequests((Slot(0, be=Counts(tokens=7)), Slot(1, be=Counts(tokens=70))))


def test_tokens_count_without_a_page(tmp_path: Path) -> None:
    """Where no page is open, nobody asks; a minute's tokens must not fall into one slot."""
    log, now = RequestLog(), 1.0

    async def say(_: bytes) -> bytes:
        return b""

    told = Siblings(NAMES[0], {NAMES[0]: tmp_path / "socket"}, say)

    async def counted() -> None:
        log.tokens[ServiceClass.RT].num += 5
        async with RequestPictures(log, lambda: now, told).listening():
            while not log.tokens[ServiceClass.RT].num_seen:
                await asyncio.sleep(0)

    uvloop.run(asyncio.wait_for(counted(), PATIENT_S))
    assert log.recent(20.0).slots == (Slot(0, Counts(tokens=5)),)
