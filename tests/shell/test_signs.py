"""Signs of life on their way to the launcher."""

from __future__ import annotations

import ctypes
import multiprocessing
import queue
from collections.abc import Iterator
from contextlib import closing

import pytest

from alignedserve.shell.link_keys import DeploymentKeys, LinkKeys
from alignedserve.shell.signs import SignInbox, SignSender
from alignedserve.signs import Sign, Stage, growing

ARRIVES_S = 60.0


@pytest.fixture
def heard() -> queue.SimpleQueue[Sign]:
    return queue.SimpleQueue()


@pytest.fixture
def keys() -> DeploymentKeys:
    return DeploymentKeys.new()


@pytest.fixture
def inbox(heard: queue.SimpleQueue[Sign], keys: DeploymentKeys) -> Iterator[SignInbox]:
    with closing(SignInbox("tcp://127.0.0.1:*", keys.parts, heard.put)) as inbox:
        yield inbox


def until(heard: queue.SimpleQueue[Sign], wanted: Sign) -> list[Sign]:
    """Return all signs up to this one."""
    signs: list[Sign] = []
    while wanted not in signs:
        signs.append(heard.get(timeout=ARRIVES_S))
    return signs


def test_the_launcher_hears_how_far_a_part_is(
    inbox: SignInbox, keys: DeploymentKeys, heard: queue.SimpleQueue[Sign]
) -> None:
    sender = SignSender("decode-0", 3, inbox.address, keys.parts)
    assert until(heard, Sign("decode-0", 3, Stage.LIBRARIES)) == [Sign("decode-0", 3, Stage.LIBRARIES)]
    sender.stage(Stage.WEIGHTS, 1000)
    for _ in range(1000):
        sender.advance()
    signs = until(heard, Sign("decode-0", 3, Stage.WEIGHTS, 1000, 1000))
    assert len(signs) < 500, "the newest sign counts, not each"
    sender.stage(Stage.RUNS)
    until(heard, Sign("decode-0", 3, Stage.RUNS))


def _runs_and_hangs(address: str, keys: LinkKeys) -> None:
    sender = SignSender("decode-0", 1, address, keys)
    sender.stage(Stage.WEIGHTS, 1)
    sender.stage(Stage.RUNS)
    ctypes.PyDLL(None).sleep(10**6)  # with Python's lock


def test_that_a_part_runs_is_heard_though_its_first_work_hangs_the_process(
    inbox: SignInbox, keys: DeploymentKeys, heard: queue.SimpleQueue[Sign]
) -> None:
    context, given = multiprocessing.get_context("spawn"), (inbox.address, keys.parts)
    process = context.Process(target=_runs_and_hangs, args=given, daemon=True)
    process.start()
    try:
        until(heard, Sign("decode-0", 1, Stage.RUNS))
    finally:
        process.kill()


def test_strangers_are_not_heard(inbox: SignInbox, keys: DeploymentKeys, heard: queue.SimpleQueue[Sign]) -> None:
    stranger = DeploymentKeys.new().parts
    stolen = type(stranger)(stranger.public, stranger.secret, keys.parts.parts, keys.parts.launcher)
    SignSender("decode-9", 1, inbox.address, stolen)
    SignSender("decode-0", 1, inbox.address, keys.parts)
    assert until(heard, Sign("decode-0", 1, Stage.LIBRARIES)) == [Sign("decode-0", 1, Stage.LIBRARIES)]


class Told:
    def __init__(self) -> None:
        self.done: queue.SimpleQueue[int] = queue.SimpleQueue()

    def stage(self, stage: Stage, total: int = 0) -> None: ...

    def advance(self, done: int = 1) -> None:
        self.done.put(done)


def test_a_library_that_says_nothing_is_watched_by_what_it_makes() -> None:
    told, made = Told(), [7]
    with growing(told, lambda: made[0], each_s=0.001):
        made[0] = 10
        assert told.done.get(timeout=ARRIVES_S) == 3
        made[0] = 30
        assert told.done.get(timeout=ARRIVES_S) == 20
    assert told.done.get(timeout=ARRIVES_S) == -23, "the caller counts what was made"


@pytest.mark.parametrize(
    ("sign", "amount", "share"),
    [
        (Sign("d", 1, Stage.WEIGHTS, 3_149_000_000, 16_060_000_000), "3.1 of 16.1 GB", 0.196),
        (Sign("d", 1, Stage.POOL, 512_000_000, 900_000_000), "512.0 of 900.0 MB", 0.569),
        (Sign("d", 1, Stage.GRAPHS, 3, 11), "3 of 11", 0.273),
        (Sign("d", 1, Stage.WEIGHTS, 12, 10), "12.0 of 10.0 bytes", 1.0),
        (Sign("d", 1, Stage.LIBRARIES, 812), "", 0.0),
    ],
)
def test_how_far_a_stage_is(sign: Sign, amount: str, share: float) -> None:
    assert sign.amount == amount
    assert sign.share == pytest.approx(share, abs=0.001)
