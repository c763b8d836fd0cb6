"""Memory follows the body: while requests are open, no part holds many times the bodies that caused them.

Every field of every body that can be long (tests/filled.py) is filled up to what the server takes, and sent many times
at once. Streams are not read, so that nothing ends early. The model has the vocabulary of Qwen, 151,936 tokens, and
hardly anything else. Measured is the private memory of each part:

    most      the most that the gateway and the router had, sampled while bodies came
    held      what each part had when all were open, without what its allocator kept of freed memory

The parts' allocator is told to give freed memory back (malloc_trim), and Python's own is switched off: or what one case
has freed would hide what the next one takes.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest

from tests.end_to_end.deployment import ANSWER_S, MODEL, NAME, Deployment, deployed, part_of, wait_until
from tests.end_to_end.patient import ENDED
from tests.filled import Place, Walk
from tests.rare import IN_SOAK, rare

pytestmark = rare  # a minute for each few fields: `make soak` tries all of them, other runs draw of an eighth

VOCAB = 151_936
MOST_TIMES = 50  # of the bytes of the bodies, in each part
MAX_BATCH = 16
CHOICE_MB = 6 / 1024  # of a gateway's memory for each choice that is open or waits, however short its prompt is
# A part's heap differs by some megabytes from moment to moment, and each connection has buffers of 64 KiB. A worker's
# step has five arrays of logits of each of its requests.
NOISE_MB = {"gateway": 24.0, "router": 16.0, "pool": 16.0, "jobs": 16.0}
STEP_MB = 16.0 + 5 * MAX_BATCH * VOCAB * 4 / 2**20
SIZES = ((3_900_000, 2), (200_000, 8), (8_000, 96))  # bytes of a body, and bodies at once
NUMBERS, BODIES_OF_NUMBERS = (2**31 - 1, 100_000, 1_000, 128, 20, 8), 96  # the largest that is taken
AT_A_TIME = 4  # fields of a test
CHOICES, BODIES_OF_CHOICES = 15, 32  # together fewer than the queue of the router takes
WALK, OF_NUMBERS = Walk(VOCAB), Walk(VOCAB, of_numbers=True)
_PARTS = ("gateway", "router", "pool", "jobs", "prefill", "decode", "colocated")
_SETTLED_S = 2.0  # without another answer: streams that are open wait for their turn
_MOST_S = 20.0
_TRIMMED_S = 60.0

_SITE = """
import ctypes, gc, os, threading, time

def follow():
    trim, seen = ctypes.CDLL(None).malloc_trim, ""
    while True:
        time.sleep(0.02)  # another process writes the file, and nothing wakes this one
        try:
            asked = open({asked!r}).read()
        except OSError:
            continue
        if asked != seen:
            if not seen:
                gc.freeze()  # a look at all that was imported would take seconds
            gc.collect()
            trim(0)
            seen = asked
            open(os.path.join({folder!r}, str(os.getpid())), "w").write(asked)

def begin():
    threading.Thread(target=follow, daemon=True).start()

os.register_at_fork(after_in_child=begin)
begin()
"""


@dataclass
class Growth:
    """What a case was answered, and by how many MB each part grew."""

    sent_mb: float
    num_choices: int
    statuses: Counter[int] = field(default_factory=Counter)
    most: dict[str, float] = field(default_factory=dict)
    held: dict[str, float] = field(default_factory=dict)

    @property
    def is_refused(self) -> bool:
        return bool(self.statuses) and not self.statuses.keys() - {400, 404, 413}

    @property
    def shown(self) -> str:
        parts = ((part, self.most[part], held) for part, held in self.held.items())
        return ", ".join(f"{part} {most:.0f}, {held:.0f}" for part, most, held in parts if max(most, held) > 4)

    def faults(self) -> Iterator[str]:
        for part in self.held:
            kind = part.partition("-")[0]
            limit = MOST_TIMES * self.sent_mb + NOISE_MB.get(kind, STEP_MB)
            limit += CHOICE_MB * self.num_choices if kind == "gateway" else 0
            grown = self.most[part] if kind in ("gateway", "router") else self.held[part]
            if grown > limit:
                yield f"{part} grew by {grown:.0f} MB for bodies of {self.sent_mb:.2f} MB"


Send: TypeAlias = Callable[[str, Mapping[str, Any], int], Growth]  # a path, a body, and how often it is sent


class Measured:
    """A deployment whose parts give freed memory back when they are asked to."""

    def __init__(self, deployment: Deployment, folder: Path) -> None:
        self.deployment, self._folder, self._asked = deployment, folder, 0
        self._pids = dict[str, int]()
        wait_until(self._has_found, _TRIMMED_S, lambda: f"{self._pids} of {deployment.processes()}")

    def _has_found(self) -> bool:
        names = {pid: part_of(command) or "" for pid, command in self.deployment.processes().items()}
        self._pids = {name: pid for pid, name in names.items() if re.fullmatch(rf"({'|'.join(_PARTS)})(-\d+)?", name)}
        return {"gateway-0", "router", "jobs-0", "decode-0"} <= self._pids.keys()

    def memory(self) -> dict[str, float]:
        """Return the private memory of each part now, in MB."""
        rows = {name: Path(f"/proc/{pid}/status").read_text() for name, pid in self._pids.items()}
        dead = [name for name, text in rows.items() if "RssAnon:" not in text]
        assert not dead, f"{dead} died: {self.deployment.log()}"
        return {name: int(text.partition("RssAnon:")[2].split()[0]) / 1024 for name, text in rows.items()}

    def trim(self) -> dict[str, float]:
        """Have all parts give back what they have freed, and return what they have then."""
        self._asked += 1
        new = self._folder / "asked.new"
        new.write_text(str(self._asked))
        new.rename(self._folder / "asked")
        told = [self._folder / str(pid) for pid in self._pids.values()]
        wait_until(
            lambda: all(file.exists() and file.read_text() == str(self._asked) for file in told),
            _TRIMMED_S,
            self.deployment.log,
        )
        return self.memory()

    @contextmanager
    def watched(self) -> Iterator[dict[str, float]]:
        """Yield the most that each part has from now until the end of the block."""
        most, ends = self.memory(), threading.Event()

        def watch() -> None:
            while not ends.wait(0.02):
                most.update({name: max(most[name], now) for name, now in self.memory().items()})

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            yield most
        finally:
            ends.set()
            watching.join()

    def open_at_once(self, path: str, body: Mapping[str, Any], count: int) -> Growth:
        """Send the body that often at once, and return what it took while all were open."""
        raw = json.dumps(body, ensure_ascii=False).encode()
        growth, before = Growth(count * len(raw) / 2**20, count * _several(body)), self.trim()
        with self.watched() as most:
            held = asyncio.run(self._held(path, raw, count, growth))
        growth.most = {name: most[name] - before[name] for name in before}
        growth.held = {name: held[name] - before[name] for name in before}
        self._wait_until_idle()
        return growth

    def lines_at_once(self, path: str, body: Mapping[str, Any], count: int) -> Growth:
        """Send the body that often as the lines of a batch, and return what it took while they were open."""
        line = {"method": "POST", "url": path, "body": body}
        data = "".join(json.dumps({"custom_id": f"{at}", **line}) + "\n" for at in range(count)).encode()
        growth, before = Growth(len(data) / 2**20, count * _several(body)), self.trim()
        with httpx.Client(base_url=self.deployment.url, timeout=ANSWER_S) as http, self.watched() as most:
            file = http.post("/v1/files", files={"file": ("lines", data)}, data={"purpose": "batch"}).json()["id"]
            asked = {"input_file_id": file, "endpoint": path, "completion_window": "24h"}
            batch = http.post("/v1/batches", json=asked).raise_for_status().json()["id"]
            held = self._held_by(http, batch, growth)
            http.post(f"/v1/batches/{batch}/cancel")
            wait_until(lambda: _state(http, batch)["status"] in ENDED, _MOST_S, self.deployment.log)
        growth.most = {name: most[name] - before[name] for name in before}
        growth.held = {name: held[name] - before[name] for name in before}
        self._wait_until_idle()
        return growth

    def _held_by(self, http: httpx.Client, batch: str, growth: Growth) -> dict[str, float]:
        """Return what each part holds when nothing of the batch has changed for a while."""
        began_at = changed_at = time.monotonic()
        state = _state(http, batch)
        while (now := time.monotonic()) - changed_at < _SETTLED_S and now - began_at < _MOST_S:
            time.sleep(0.1)  # between two looks: the server tells nobody that a batch has moved
            if (newer := _state(http, batch)) != state:
                state, changed_at = newer, time.monotonic()
        done = state["request_counts"]
        growth.statuses += Counter({200: done["completed"], 400: done["failed"]})  # those that there are
        return self.trim()

    def _wait_until_idle(self) -> None:
        """Wait until what was abandoned is tokenised: this text takes the same thread, and comes behind it."""
        body = {"prompt": "a" * 20_000}
        httpx.post(f"{self.deployment.url}/tokenize", json=body, timeout=ANSWER_S).raise_for_status()

    async def _held(self, path: str, raw: bytes, count: int, growth: Growth) -> dict[str, float]:
        writers: list[asyncio.StreamWriter] = []

        async def send() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.deployment.port, limit=1 << 16)
            writers.append(writer)
            head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
            await writer.drain()
            status = int((await reader.readline()).split()[1])
            growth.statuses[status] += 1

        sending = [asyncio.create_task(send()) for _ in range(count)]
        began_at = changed_at = time.monotonic()
        num_answered = 0
        settled_s = _SETTLED_S if WALK.has(path, "stream") else _MOST_S
        while num_answered < count and (now := time.monotonic()) - changed_at < settled_s and now - began_at < _MOST_S:
            await asyncio.sleep(0.05)
            if growth.statuses.total() != num_answered:
                num_answered, changed_at = growth.statuses.total(), time.monotonic()
        held = await asyncio.to_thread(self.trim)
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
        for writer in writers:
            with suppress(OSError):
                writer.transport.abort()
        return held


def _several(body: Mapping[str, Any]) -> int:
    """Return the number of a body's choices."""
    prompts, choices = body.get("prompt"), int(body.get("n", 1))
    return choices * len(prompts) if isinstance(prompts, list) and not isinstance(prompts[0], int) else choices


def _state(http: httpx.Client, batch: str) -> Any:
    return http.get(f"/v1/batches/{batch}").raise_for_status().json()


@contextmanager
def measured(folder: Path, model: Path, *flags: str, topology: str) -> Iterator[Measured]:
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_SITE.format(asked=str(folder / "asked"), folder=str(folder)))
    root = str(Path(__file__).parents[2])
    environment = {
        "PYTHONPATH": os.pathsep.join([str(site), root, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONMALLOC": "malloc",
    }
    flags = ("--set", f"wire.death_s={_MOST_S:g}", *flags)  # to look for garbage stops a part for a moment
    with deployed(*flags, topology=topology, model=model, environment=environment) as deployment:
        yield Measured(deployment, folder)


@pytest.fixture(scope="module")
def writes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    """Yield a deployment of a model that has a large vocabulary and is small in all else; it makes embeddings too."""
    folder = tmp_path_factory.mktemp("writes")
    shapes = json.loads((MODEL / "config.json").read_text())
    shapes |= {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    shapes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 32_768}
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(shapes))
    flags = ("--load-format", "dummy", "--cache-directory", str(folder / "cache"), "--max-batch", str(MAX_BATCH))
    with measured(folder, model, *flags, topology="1+1") as deployment:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100, "stream": True}
        deployment.open_at_once("/v1/chat/completions", body, BODIES_OF_NUMBERS)  # the first steps make buffers
        form = {"model": NAME, "messages": body["messages"], "guided_choice": ["a", "b"]}
        deployment.lines_at_once("/v1/chat/completions", form, MAX_BATCH)  # the first form makes masks
        yield deployment
    shutil.rmtree(folder / "cache")


def smaller(place: Place, beside: Mapping[str, Any], send: Send) -> Iterator[tuple[str, Growth]]:
    """Send bodies with this place filled, of smaller and smaller sizes until the server takes them. Yield what each
    case took."""
    for size, count in SIZES:
        growth = send(place.path, {**_LONG_OUTPUT[place.path], **beside, **place.make(size)}, count)
        yield f"{count} of {size}", growth
        if not growth.is_refused and growth.sent_mb * 2**20 > count * size / 2:
            break  # what is shorter is no more, but for what each request of many takes


def grown(of: Measured, place: Place) -> Iterator[tuple[str, Growth]]:
    """Send such bodies, and then bodies with several choices. Yield what each case took."""
    beside = _beside(place)
    yield from smaller(place, beside, of.open_at_once)
    if WALK.has(place.path, "n"):
        size = SIZES[-1][0]
        body = {**_LONG_OUTPUT[place.path], **beside, **place.make(size), "n": CHOICES}
        yield f"{CHOICES} choices of {size}", of.open_at_once(place.path, body, BODIES_OF_CHOICES)


def _beside(place: Place) -> dict[str, Any]:
    """Return what stands beside this field, which the schema does not ask for."""
    if place.path == "/v1/score" and not place.name.startswith(("text_", "queries", "items")):
        return {"text_1": "a", "text_2": "a"}
    return {"stream": True} if WALK.has(place.path, "stream") else {}


def large(of: Measured, place: Place) -> Iterator[tuple[str, Growth]]:
    """Send small bodies with this number as large as the server takes. Yield what each case took."""
    for number in NUMBERS:
        body = {**_LONG_OUTPUT[place.path], **_beside(place), **place.make(number)}
        yield f"{number}", (growth := of.open_at_once(place.path, body, BODIES_OF_NUMBERS))
        if not growth.is_refused:
            break


def drawn(places: list[Place]) -> list[Place]:
    return places if IN_SOAK else places[::8]


PLACES, NUMBER_PLACES = drawn(WALK.places()), drawn(OF_NUMBERS.places())
PATHS = [*dict.fromkeys(place.path for place in WALK.places())]
LINES = ("/v1/chat/completions", "/v1/completions", "/v1/responses")  # of a batch
_LONG_OUTPUT = {
    path: {name: 2_000 for name in ("max_tokens", "max_output_tokens") if WALK.has(path, name)} for path in PATHS
}


def in_parts(*paths: str, of: Sequence[Place] = PLACES) -> list[Any]:
    """Return the places of these routes, a few at a time."""
    of_path = [[place for place in of if place.path == path] for path in paths]
    parts = [places[at : at + AT_A_TIME] for places in of_path for at in range(0, len(places), AT_A_TIME)]
    return [pytest.param(part, id=f"{part[0]} and {len(part) - 1} more") for part in parts]


def check(places: Sequence[Place], grown: Callable[[Place], Iterator[tuple[str, Growth]]]) -> None:
    faults, taken = list[str](), 0
    for place in places:
        is_taken = False
        for case, growth in grown(place):
            faults += [f"{place}, {case}: {fault}" for fault in growth.faults()]
            is_taken |= not growth.is_refused
            print(f"{place}, {case}: {dict(growth.statuses)}, {growth.sent_mb:.2f} MB sent,", growth.shown)
        taken += is_taken
    assert not faults, "\n".join(faults)
    print(f"{taken} of {len(places)} fields were taken")


@pytest.mark.parametrize("places", in_parts(*PATHS))
def test_no_part_holds_many_times_the_body(writes: Measured, places: Sequence[Place]) -> None:
    check(places, partial(grown, writes))


@pytest.mark.parametrize("places", in_parts(*PATHS, of=NUMBER_PLACES))
def test_nor_of_a_small_body_with_a_large_number(writes: Measured, places: Sequence[Place]) -> None:
    check(places, partial(large, writes))


@pytest.mark.parametrize("places", in_parts(*LINES))
def test_nor_of_the_lines_of_a_batch(writes: Measured, places: Sequence[Place]) -> None:
    check(places, partial(smaller, beside={}, send=writes.lines_at_once))


def test_every_route_is_tried() -> None:
    assert {*PATHS} == {
        *("/v1/embeddings", "/v1/score", "/v1/rerank"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/chat/completions", "/v1/completions"),
        *("/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize", "/v1/batches"),
        *("/completion", "/infill"),
    }, "a new route is tried too, or named above"
