"""Tests of corrupt pages: they never bring a wrong token, are always recomputed, and are counted.

Real cores, real engines and a real arena; the test carries their messages, and spoils pages just before they are read.
"""

from __future__ import annotations

import signal
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from alignedserve.core import FinishReason, Request, ServiceClass, WorkerLimits
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.engine.engine import Engine
from alignedserve.executor.hands import EngineHands
from alignedserve.kvpool.arena.arena import Arena, Contents
from alignedserve.kvpool.state import PoolCore
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.protocol.commands import Command, CopyIn, CopyOut, RunStep, Send
from alignedserve.protocol.events import Event, MemberJoined, Received
from alignedserve.protocol.extents import PageKind
from alignedserve.protocol.messages import ROUTER, Prefill, Progress, Tokens
from alignedserve.worker.setup import WorkerSetup
from tests.engine.driver import prompt_of
from tests.rare import thinned
from tests.reference import Tally, compare
from tests.samples import POOL_MEMBER, next_attempt, request

BLOCK_SIZE, PAGE_SIZE, NUM_PAGES, OUTPUT = 4, 8, 12, 6
LIMITS = WorkerLimits(64, BLOCK_SIZE, PAGE_SIZE, max_step_tokens=16, max_batch=4)
WORD = struct.Struct("=Q")
HEADERS_AT, HEADER_BYTES = 4096, 64  # from the drawing in kvpool/arena/arena.py
GENERATION, INCARNATION, KIND, LENGTH, TOKEN_HASH, CHECKSUM = range(6)

Spoil = Callable[[Arena, int], None]


@dataclass
class Deployment:
    """A prefill worker, a pool and a decode worker; what they say to the router and the owner ends here."""

    cores: dict[str, Any]
    hands: dict[str, EngineHands]
    arena: Arena
    before_copy: Callable[[str, CopyIn], None] = lambda _worker, _copy: None
    output: dict[str, list[int]] = field(default_factory=dict)
    lost: list[tuple[str, int]] = field(default_factory=list)
    num_doubted: dict[str, int] = field(default_factory=dict)
    _todo: deque[tuple[str, Event]] = field(default_factory=deque)

    def run(self, request: Request) -> list[int]:
        """Run the request, through as many attempts as it takes, and return its output."""
        self.output[request.id] = []
        self._tell("prefill-0", Received(ROUTER, Prefill(request), 1))
        while len(self.output[request.id]) < request.max_tokens:
            lost, self.lost = self.lost, []
            assert lost, "nobody has it any more"
            request = next_attempt(request, self.output[request.id])
            self._tell("prefill-0", Received(ROUTER, Prefill(request), 1))
        return self.output[request.id]

    @property
    def num_refused(self) -> dict[str, int]:
        """Return how many copies each worker that runs now refused, where it did any."""
        numbers = {name: self.cores[name].log.counts.num_refused for name in self.hands}
        return {name: number for name, number in numbers.items() if number}

    def start_prefill_again(self) -> None:
        """Let the prefill worker start again: it knows nothing of what its device has."""
        self.cores["prefill-0"] = PrefillCore(WorkerSetup(LIMITS, root=b"model"))
        self._tell("prefill-0", MemberJoined(POOL_MEMBER))

    def meet(self) -> None:
        for name, hands in self.hands.items():
            hands.meet(POOL_MEMBER)
            self._tell(name, MemberJoined(POOL_MEMBER))

    def _tell(self, to: str, event: Event) -> None:
        self._todo.append((to, event))
        while self._todo:
            name, event = self._todo.popleft()
            for command in self.cores[name].handle(event, 0.0):
                self._perform(name, command)

    def _perform(self, name: str, command: Command) -> None:
        match command:
            case Send(to, message) if to in self.cores:
                self._todo.append((to, Received(name, message, 1)))
            case Send(message=Tokens(outputs)):
                for output in outputs:
                    assert output.index == len(self.output[output.request]), "tokens come once, and in their order"
                    self.output[output.request] += output.tokens
                    if output.finish is FinishReason.DOUBT:
                        self.lost.append((output.request, output.attempt))
                        self.num_doubted[name] = self.num_doubted.get(name, 0) + 1
            case Send(message=Progress() as progress):
                self.lost += progress.lost
            case RunStep() | CopyOut() | CopyIn():
                if isinstance(command, CopyIn):
                    self.before_copy(name, command)
                done = self.hands[name].perform(command)
                assert done is not None
                self._todo.append((name, done))

    def spoil_once(self, worker: str, spoil: Spoil) -> None:
        """Spoil a page of the first copy to this worker."""

        def before(name: str, copy: CopyIn) -> None:
            if name == worker:
                self.before_copy = lambda _worker, _copy: None
                spoil(self.arena, copy.pages[0])

        self.before_copy = before


@pytest.fixture
def folder(folder_of: Callable[[str], Path]) -> Path:
    return folder_of("gqa-untied")


@pytest.fixture
def verify() -> bool:
    return True


@pytest.fixture
def deployment(folder: Path, tmp_path: Path, verify: bool) -> Iterator[Deployment]:
    engines = {
        name: Engine(folder, num_blocks=64, block_size=BLOCK_SIZE, dtype="float32")
        for name in ("prefill-0", "decode-0")
    }
    layers, _, _, kv_dim = engines["decode-0"].cache.shape
    payload_bytes = layers * 2 * PAGE_SIZE * kv_dim * 4
    path = tmp_path / "arena"
    made = Arena.create(path, pages=NUM_PAGES, payload_bytes=payload_bytes, page_size=PAGE_SIZE, incarnation=1)
    with closing(made) as arena:
        cores = {
            "prefill-0": PrefillCore(WorkerSetup(LIMITS, root=b"model")),
            "decode-0": decode_core(WorkerSetup(LIMITS)),
            "pool-0": PoolCore(NUM_PAGES, BLOCK_SIZE),
        }
        hands = {name: EngineHands(engine, path, PAGE_SIZE, verify) for name, engine in engines.items()}
        for engine in engines.values():
            engine.cache.fill_(float("nan"))  # NaN shows if a request reads places that were not written for it
        deployment = Deployment(cores, hands, arena)
        deployment.meet()
        yield deployment
        for worker_hands in hands.values():
            worker_hands.part_from(POOL_MEMBER)


@pytest.fixture
def check(folder: Path, reference_of: Callable[[Path], Any]) -> Callable[[Request, list[int]], None]:
    def equal(request: Request, output: list[int]) -> None:
        tally = Tally()
        compare(reference_of(folder), request.prompt, output, tally, request.id)
        tally.check()

    return equal


def asked(name: str, seed: int = 1, service: ServiceClass = ServiceClass.RT) -> Request:
    """Return a request with two full pages and a part of a third."""
    prompt = prompt_of(seed, 20)
    return replace(request(name), prompt=prompt, max_tokens=OUTPUT, stop_tokens=(), service=service)


# --- Ways to spoil a page


def word(field: int, change: Callable[[int], int]) -> Spoil:
    def spoil(arena: Arena, page: int) -> None:
        at = HEADERS_AT + page * HEADER_BYTES + field * WORD.size
        with arena.memory() as memory:
            (value,) = WORD.unpack_from(memory, at)
            WORD.pack_into(memory, at, change(value))

    return spoil


def flip(arena: Arena, page: int) -> None:
    payload = arena.payload(page)
    payload[len(payload) // 2] ^= 4
    payload.release()


def not_a_number(arena: Arena, page: int) -> None:
    """Set the bits of a number's exponent and its first digit, in the last V vector."""
    with arena.payload(page) as payload:
        at = len(payload) - 4
        payload[at + 2 : at + 4] = bytes((payload[at + 2] | 0xC0, payload[at + 3] | 0x7F))


def another_has_it_by_now(arena: Arena, page: int) -> None:
    """Write other content to the page: it is intact, its generation two further; only a reader of the old content is
    wrong."""
    arena.begin_write(page)
    with arena.payload(page) as payload:
        payload[:] = bytes(len(payload))
    arena.end_write(page, Contents(PageKind.KV, PAGE_SIZE, 12345), checksum=1)


def killed_writer(arena: Arena, page: int) -> None:
    """Have a process write half of the page and die by SIGKILL, so that none of our own clean-up runs."""
    code = f"""
import os, signal
from itertools import product
from pathlib import Path
from alignedserve.kvpool.arena.arena import Arena
arena = Arena.attach(Path({str(arena.path)!r}))
arena.begin_write({page})
payload = arena.payload({page})
payload[: len(payload) // 2] = bytes(len(payload) // 2)
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


WAYS: dict[str, Spoil] = {
    "generation odd": word(GENERATION, lambda value: value + 1),
    "generation never": word(GENERATION, lambda _: 0),
    "incarnation": word(INCARNATION, lambda value: value + 1),
    "kind": word(KIND, lambda value: value + 1),
    "length": word(LENGTH, lambda value: value - 1),
    "token hash": word(TOKEN_HASH, lambda value: value ^ 1),
    "checksum": word(CHECKSUM, lambda value: value ^ 1),
    "no checksum": word(CHECKSUM, lambda _: 0),
    "payload": flip,
    "another's": another_has_it_by_now,
    "killed writer": killed_writer,
}


@pytest.mark.parametrize("way", thinned(WAYS, usual=3))
def test_on_its_way_to_be_decoded(
    deployment: Deployment, check: Callable[[Request, list[int]], None], way: str
) -> None:
    """The attempt is lost, and the pool forgets its pages; the next attempt goes on after the tokens that were
    delivered, and commits pages of its own."""
    request = asked("a")
    deployment.spoil_once("decode-0", WAYS[way])
    check(request, deployment.run(request))
    assert deployment.num_refused == {"decode-0": 1}


@pytest.mark.parametrize("way", thinned(WAYS, usual=7))
def test_as_the_beginning_of_another_prompt(
    deployment: Deployment, check: Callable[[Request, list[int]], None], way: str
) -> None:
    """A request computes the pages that are not intact, and the third request begins with what the second one wrote."""
    first, second, third = (asked(name) for name in "abc")
    check(first, deployment.run(first))
    deployment.start_prefill_again()
    deployment.spoil_once("prefill-0", WAYS[way])
    check(second, deployment.run(second))
    assert deployment.num_refused == {"prefill-0": 1}
    deployment.start_prefill_again()
    check(third, deployment.run(third))
    assert not deployment.num_refused
    assert deployment.cores["prefill-0"].seats.num_reused_tokens == 2 * PAGE_SIZE, (
        "the third began with what the second wrote"
    )


@pytest.mark.parametrize("verify", [False])
@pytest.mark.parametrize(("worker", "service"), thinned(product(("decode-0", "prefill-0"), ServiceClass), usual=2))
def test_kv_that_is_not_a_number_is_computed_anew_where_pages_are_not_verified(
    deployment: Deployment, check: Callable[[Request, list[int]], None], worker: str, service: ServiceClass
) -> None:
    """It is the KV of a request that goes on to be decoded, or the beginning of another prompt."""
    for name in ("a", "b", "c"):
        if name == ("a" if worker == "decode-0" else "b"):
            deployment.spoil_once(worker, not_a_number)
        request = asked(name, service=service)
        check(request, deployment.run(request))
        deployment.start_prefill_again()
    assert deployment.num_doubted == {worker: 1}, "no other request gets the page"
    assert not deployment.num_refused


def test_a_best_effort_request_fares_the_same(
    deployment: Deployment, check: Callable[[Request, list[int]], None]
) -> None:
    request = asked("a", service=ServiceClass.BE)
    deployment.spoil_once("decode-0", flip)
    check(request, deployment.run(request))
    assert deployment.num_refused == {"decode-0": 1}


def test_nothing_is_counted_where_all_is_well(
    deployment: Deployment, check: Callable[[Request, list[int]], None]
) -> None:
    for name, seed in (("a", 1), ("b", 2), ("c", 1)):
        check(asked(name, seed), deployment.run(asked(name, seed)))
    assert not deployment.num_refused
