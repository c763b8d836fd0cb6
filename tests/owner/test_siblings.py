"""Each gateway can ask all owners of requests."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import TypeVar

import pytest
import uvloop

from alignedserve.owner.siblings import Siblings
from tests.gateway.conftest import PATIENT_S

T = TypeVar("T")
NAMES = ("gateway-0", "gateway-1", "gateway-2")


def sockets_in(folder: Path) -> dict[str, Path]:
    return {name: folder / f"{name}.sock" for name in NAMES}


def sibling(number: int, folder: Path) -> Siblings:
    async def say(question: bytes) -> bytes:
        return f"I am {number}".encode() + question

    return Siblings(NAMES[number], sockets_in(folder), say)


def told(work: Coroutine[None, None, T]) -> T:
    return uvloop.run(asyncio.wait_for(work, PATIENT_S))


def test_all_that_live_answer_once(tmp_path: Path) -> None:
    async def by_both() -> list[list[bytes]]:
        gateways = [sibling(0, tmp_path), sibling(1, tmp_path)]  # the third gateway has not started yet
        async with gateways[0].listening(), gateways[1].listening():
            gc.collect()
            return [await gateway.ask_all(b"!") for gateway in gateways]

    assert told(by_both()) == [[b"I am 0!", b"I am 1!"], [b"I am 1!", b"I am 0!"]]


def test_a_gateway_that_was_killed_is_left_out_until_it_listens_again(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(sockets_in(tmp_path)[NAMES[0]]))

    async def by_the_other() -> tuple[list[bytes], list[bytes]]:
        first, second = sibling(0, tmp_path), sibling(1, tmp_path)
        async with second.listening():
            alone = await second.ask_all()
            async with first.listening():
                return alone, await second.ask_all()

    assert told(by_the_other()) == ([b"I am 1"], [b"I am 1", b"I am 0"])
    assert not list(tmp_path.iterdir())


def test_a_gateway_that_has_left_refuses_whoever_still_finds_it(tmp_path: Path) -> None:
    still_there = tmp_path / "found"

    async def after_it_left() -> None:
        async with sibling(0, tmp_path).listening():
            still_there.hardlink_to(sockets_in(tmp_path)[NAMES[0]])
        await asyncio.open_unix_connection(still_there)

    with pytest.raises(ConnectionRefusedError):
        told(after_it_left())


def test_a_single_gateway_asks_nobody(tmp_path: Path) -> None:
    own = tmp_path / "gateway-0.sock"

    async def by_itself() -> list[bytes]:
        async def say(_: bytes) -> bytes:
            return b"alone"

        gateway = Siblings("gateway-0", {"gateway-0": own}, say)
        async with gateway.listening():
            assert not own.exists()
            return await gateway.ask_all()

    assert told(by_itself()) == [b"alone"]
