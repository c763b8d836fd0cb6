"""Tests of ranks that meet: strangers neither hear nor stop them, whatever they say and however often.

Who comes has opened the folder, as another user may not (tests/end_to_end/test_stranger.py).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from alignedserve.core import Role
from alignedserve.engine.device.ranks import Team
from alignedserve.errors import RankLost
from alignedserve.protocol.messages import rank_suffix
from alignedserve.shell.clock import ClockOrigin
from alignedserve.shell.link_keys import LinkKeys
from alignedserve.shell.part import PartSpec
from alignedserve.transport import joining
from alignedserve.transport.joining import SECRET_BYTES, door_of, listening, meet
from tests.transport.nodes import DEADLINE_S, HOST, KEYS, SOON_S
from tests.transport.test_strangers import AT_ONCE_S, FOREIGN, HALF_KNOWN, SAID, all_heard

CPU = torch.device("cpu")
MOST = 300  # connections of strangers: beyond 100, the oldest ones end
Specs = list[PartSpec]


@pytest.fixture(params=[2, 3])
def size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def specs_of(size: int) -> Specs:
    deployment = f"alignedserve-test-{os.getpid()}"
    rank_0 = PartSpec(Role.DECODE, "decode-0", "here", deployment, HOST, "", {}, ClockOrigin.read(), 3, KEYS)
    return [replace(rank_0, name=f"decode-0{rank_suffix(rank)}", rank=rank) for rank in range(size)]


def met(specs: Specs, late: int, wait: Callable[[], object]) -> list[Team]:
    """Have all ranks meet, of which one waits first."""

    def one(spec: PartSpec) -> Team:
        if spec.rank == late:
            wait()
        return meet(spec, len(specs), CPU, DEADLINE_S)

    with ThreadPoolExecutor(len(specs)) as pool:
        return list(pool.map(one, specs))


def check_they_work(teams: list[Team]) -> None:
    tensors = [torch.full((3, 50), 1.0 + rank) for rank in range(len(teams))]
    with ThreadPoolExecutor(len(teams)) as pool:
        assert [*pool.map(Team.all_say, teams, "abc")] == [[*"abc"[: len(teams)]]] * len(teams)
        list(pool.map(Team.total, teams, tensors))
    assert all((each == sum(range(len(teams) + 1))).all() for each in tensors)
    for rank, other in enumerate(teams[1:], 1):
        other.told[0].tell(b"%d" % rank)
        assert teams[0].told[rank].hear(10) == b"%d" % rank


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_meet_whichever_comes_late_and_listen_nowhere_afterwards(size: int, late: int) -> None:
    specs = specs_of(size)
    teams = met(specs, late, lambda: time.sleep(0.3))
    check_they_work(teams)
    assert not any(door_of(spec, spec.rank).exists() for spec in specs)


@contextmanager
def besieged(door: Path, said: list[bytes]) -> Iterator[list[socket.socket]]:
    """Connect as soon as somebody listens there, and go on; yield the connections, which stay."""
    came, is_over = list[socket.socket](), threading.Event()

    def besiege() -> None:
        while not is_over.wait(0.001) and len(came) < MOST:
            link = socket.socket(socket.AF_UNIX)
            with suppress(OSError):
                link.connect(str(door))
                came.append(link)
                link.sendall(said[len(came) % len(said)])

    besieger = threading.Thread(target=besiege)
    besieger.start()
    try:
        yield came
    finally:
        is_over.set()
        besieger.join()


@pytest.mark.parametrize("said", SAID)
def test_hundreds_of_strangers_neither_hear_nor_stop_ranks_that_meet_and_run(size: int, said: str) -> None:
    """They come before the last rank does, and stay."""
    specs, began = specs_of(size), time.monotonic()
    with besieged(door_of(specs[0], 0), SAID[said]) as came:

        def until_many_are_there() -> None:
            while len(came) < 200:
                assert time.monotonic() - began < AT_ONCE_S
                time.sleep(0.001)

        teams = met(specs, 1, until_many_are_there)
        for _ in range(20):
            check_they_work(teams)
    assert time.monotonic() - began < AT_ONCE_S
    for stranger in came:
        assert len(all_heard(stranger)) <= SECRET_BYTES, "it hears a nonce at most, and its connection ends"
    check_they_work(teams)


def other_life(spec: PartSpec) -> PartSpec:
    return replace(spec, incarnation=spec.incarnation - 1)


def other_worker(spec: PartSpec) -> PartSpec:
    return replace(spec, name=spec.name.replace("decode-0", "decode-1"))


def with_keys(keys: LinkKeys) -> Callable[[PartSpec], PartSpec]:
    return partial(replace, keys=keys)


@pytest.mark.parametrize(
    "become",
    [with_keys(FOREIGN), with_keys(HALF_KNOWN), other_life, other_worker],
    ids=["foreign", "half-known", "another life", "another worker"],
)
def test_ranks_of_other_keys_and_of_other_lives_are_not_taken_for_ours(
    become: Callable[[PartSpec], PartSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come to the same door."""
    specs = specs_of(2)
    monkeypatch.setattr(joining, "door_of", lambda _, rank: door_of(specs[0], rank))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, specs[0], 2, CPU, DEADLINE_S)
        with pytest.raises(RankLost, match="no rank has let this one in"):
            meet(become(specs[1]), 2, CPU, SOON_S)
        assert not first.done()
        second = meet(specs[1], 2, CPU, DEADLINE_S)
        check_they_work([first.result(DEADLINE_S), second])


def test_a_rank_whose_others_do_not_come_is_lost() -> None:
    for spec in specs_of(2):
        with pytest.raises(RankLost, match=r"do not meet.*in time"):
            meet(spec, 2, CPU, SOON_S)


def test_what_listens_in_the_place_of_rank_0_learns_nothing() -> None:
    specs = specs_of(2)
    heard = list[int]()

    def answer(door: socket.socket) -> None:
        with suppress(OSError):
            while True:
                link, _ = door.accept()
                with link:
                    link.sendall(os.urandom(32))
                    heard.append(len(link.recv(4096)))
                    link.sendall(os.urandom(32))
                    heard.append(len(link.recv(4096)))

    with listening(str(door_of(specs[0], 0))) as door:
        stranger = threading.Thread(target=answer, args=(door,))
        stranger.start()
        with pytest.raises(RankLost, match="no rank has let this one in"):
            meet(specs[1], 2, CPU, SOON_S)
        door.shutdown(socket.SHUT_RDWR)
    door_of(specs[0], 0).unlink()
    stranger.join()
    assert {*heard} == {64, 0}
