"""Tests that each gateway reports on all gateways."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import TypeVar

import uvloop
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from alignedserve.gateway.http.siblings import Siblings
from tests.gateway.conftest import PATIENT_S

T = TypeVar("T")
NAMES = ("gateway-0", "gateway-1", "gateway-2")


def series(number: int) -> bytes:
    registry = CollectorRegistry()
    Counter("asked", "How often.", ["path"], registry=registry).labels("/a{b} c").inc(number + 1)
    Counter("plain", "Without labels.", registry=registry).inc(7)
    Histogram("took", "How long.", buckets=(1.0, 2.0), registry=registry).observe(number)
    return generate_latest(registry)


def sockets_in(folder: Path) -> dict[str, Path]:
    return {name: folder / f"{name}.sock" for name in NAMES}


def sibling(number: int, folder: Path) -> Siblings:
    return Siblings(NAMES[number], sockets_in(folder), partial(bytes, series(number)))


def told(work: Coroutine[None, None, T]) -> T:
    return uvloop.run(asyncio.wait_for(work, PATIENT_S))


def test_all_are_told_once_by_each_that_lives(tmp_path: Path) -> None:
    async def by_both() -> list[bytes]:
        gateways = [sibling(0, tmp_path), sibling(1, tmp_path)]  # the third gateway has not started yet
        async with gateways[0].listening(), gateways[1].listening():
            gc.collect()
            return [await gateway.series() for gateway in gateways]

    first, second = told(by_both())
    assert first == second
    families = {family.name: family.samples for family in text_string_to_metric_families(first.decode())}
    asked = [sample for sample in families["asked"] if sample.name == "asked_total"]
    assert [(sample.labels, sample.value) for sample in asked] == [
        ({"gateway": "gateway-0", "path": "/a{b} c"}, 1),
        ({"gateway": "gateway-1", "path": "/a{b} c"}, 2),
    ]
    assert [sample.value for sample in families["plain"] if sample.name == "plain_total"] == [7, 7]
    assert [sample.value for sample in families["took"] if sample.name == "took_count"] == [1, 1]
    assert first.decode().count("# TYPE took histogram") == 1


def test_a_gateway_that_was_killed_is_left_out_until_it_listens_again(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(sockets_in(tmp_path)[NAMES[0]]))

    async def by_the_other() -> tuple[bytes, bytes]:
        first, second = sibling(0, tmp_path), sibling(1, tmp_path)
        async with second.listening():
            alone = await second.series()
            async with first.listening():
                return alone, await second.series()

    alone, together = told(by_the_other())
    assert b'gateway="gateway-0"' not in alone
    assert b'gateway="gateway-0"' in together
    assert not list(tmp_path.iterdir())


def test_a_single_gateway_adds_nothing(tmp_path: Path) -> None:
    told_once, own = series(0), tmp_path / "gateway-0.sock"

    async def by_itself() -> bytes:
        gateway = Siblings("gateway-0", {"gateway-0": own}, partial(bytes, told_once))
        async with gateway.listening():
            assert not own.exists()
            return await gateway.series()

    assert told(by_itself()) == told_once
