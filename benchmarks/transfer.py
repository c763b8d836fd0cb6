"""How fast KV goes from one worker's device to another's, and what that costs the steps that run meanwhile.

    python -m benchmarks.transfer                # about a minute
    python -m benchmarks.transfer --rounds 200   # steadier, where others use the cores

A model with 12 layers and 768-wide K and V in bf16 (36 KB for a token), requests of 512 tokens, pages of 64. `host` is
copy out and copy in through an arena; `collective` is a second process that sends over Gloo; both are timed in turn
with memcpy of as many bytes, and a figure is the best. Then steps of an engine of that size run in rows, alone and
beside copies in turn. What is compared is the core time of the whole process, that of the copies included: as if they
had no core but the step's, and whoever else is on this machine. The figure is the median over the pairs of how much
more the second took. Ends with 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import queue
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Event
from time import perf_counter, process_time

import torch

from alignedserve.commands import CopyIn, ReceiveKv, SendKv
from alignedserve.core import Chunk, Decode, Role, Sampling, StepPlan
from alignedserve.engine import large_pages
from alignedserve.engine.aside import AsideCopies
from alignedserve.engine.copies import PageCopier
from alignedserve.engine.engine import Engine
from alignedserve.engine.pace import Pace
from alignedserve.events import CopiedIn, CopiedOut, KvReceived
from alignedserve.kvpool.arena import Arena
from alignedserve.messages import Member
from alignedserve.transport.collective import Collective
from alignedserve.transport.groups import why_no_gloo
from alignedserve.transport.payload import DeviceBlocks
from alignedserve.transport.transport import Outcome
from benchmarks.models import MAKERS, VOCAB
from benchmarks.report import report

LAYERS, KV_DIM, PAGE, BLOCK = 12, 768, 64, 16
TOKEN_BYTES = LAYERS * 2 * KV_DIM * 2
LENGTH = 512
EACH = LENGTH // BLOCK  # pairs
NUM_PAIRS = 40 * EACH
TOKENS = tuple(random.Random(1).choices(range(VOCAB), k=LENGTH))
PROMPT, BATCH, PREFIX = 64, 16, 256  # of the steps
STEPS = 8  # in a row
GOAL = 0.05  # longer at most
TIMEOUT_S = 600.0  # so that the peer, which is told of all transfers at once, waits for ours
MOST_TRANSFERS = 20_000
POOL = "pool-0.1"


def member(name: str, transport: Collective) -> Member:
    return Member(name, Role(name.partition("-")[0]), "local", 1, "", transport.address)


def collective(name: str, cache: torch.Tensor, pace: Pace) -> Collective:
    return Collective(f"{name}.1", "127.0.0.1", DeviceBlocks(cache), pace, verify=False, timeout_s=TIMEOUT_S)


def send_for_ever(to_us: Connection) -> None:
    """The other process: a prefill worker that sends whatever is asked for."""
    torch.set_num_threads(1)
    cache = large_pages.zeros((LAYERS, 4 * EACH, BLOCK, KV_DIM), torch.bfloat16).normal_()
    with closing(collective("prefill-0", cache, Pace())) as transport:
        to_us.send(asdict(member("prefill-0", transport)))
        fields = to_us.recv()
        transport.meet(Member(**(fields | {"role": Role(fields["role"])})))
        sent: queue.Queue[Outcome] = queue.Queue()
        for number in range(1, MOST_TRANSFERS):
            transport.start(SendKv(number, "decode-0.1", tuple(range(EACH)), TOKENS), sent.put)
            if number > 4:  # a few are under way
                sent.get()


class Bench:
    """An engine with an arena and a peer; its cache's first pairs are those of the steps."""

    def __init__(self, engine: Engine, arena: Arena, peer: Connection | None) -> None:
        self.engine, self._arena = engine, arena
        self.pace, self.unpaced = Pace(), Pace(share=1.0)
        self._anywhere = random.Random(2).sample(range(NUM_PAIRS // 2, NUM_PAIRS), 2 * EACH)
        self.pages = tuple(range(LENGTH // PAGE))
        self.copier = self.new_copier()
        self._posted: queue.Queue[Outcome] = queue.Queue()
        self._number = 0
        self._transport: Collective | None = None
        if peer is not None:
            self._transport = collective("decode-0", engine.cache, self.pace)
            fields = peer.recv()
            self._transport.meet(Member(**(fields | {"role": Role(fields["role"])})))
            peer.send(asdict(member("decode-0", self._transport)))

    def new_copier(self) -> PageCopier:
        return PageCopier(self.engine.cache, self._arena, PAGE, verify=False)

    @property
    def here(self) -> tuple[int, ...]:
        return tuple(self._anywhere[:EACH])

    @property
    def there(self) -> tuple[int, ...]:
        return tuple(self._anywhere[EACH:])

    def memcpy(self) -> None:
        source = self.engine.cache.data_ptr() + NUM_PAIRS * BLOCK * KV_DIM * 2
        for page in self.pages:
            to = torch.frombuffer(self._arena.payload(page), dtype=torch.uint8).data_ptr()
            ctypes.memmove(to, source + page * PAGE * TOKEN_BYTES, PAGE * TOKEN_BYTES)

    def out(self) -> None:
        self.copier.copy_out(self.here, self.pages, TOKENS)

    def back(self) -> None:
        if not self.copier.copy_in(self.pages, self.there, TOKENS):
            raise SystemExit("a page did not hold what was written there: these figures mean nothing")

    def receive(self, done: Callable[[Outcome], None] | None = None) -> None:
        """The next request from the peer; waits for it where nobody else does."""
        assert self._transport is not None
        self._number += 1
        order = ReceiveKv(self._number, "prefill-0.1", self.there, TOKENS)
        self._transport.start(order, done or self._posted.put)
        if done is None and self._posted.get() != KvReceived(self._number, "prefill-0.1", intact=True):
            raise SystemExit("a transfer failed: these figures mean nothing")

    def prompt_step(self) -> StepPlan:
        return StepPlan(1, (Chunk("prompt", TOKENS[:PROMPT], 0, tuple(range(PROMPT // BLOCK)), Sampling()),))

    def decode_step(self) -> StepPlan:
        each = PREFIX // BLOCK + 1
        pairs = [tuple(range(at * each, (at + 1) * each)) for at in range(BATCH)]
        return StepPlan(1, (), tuple(Decode(f"{i}", 5, PREFIX, pairs[i], Sampling(), 1) for i in range(BATCH)))

    def seconds(self, plan: StepPlan, pace: Pace) -> float:
        """Of one, where several follow each other."""
        began = process_time()
        for _ in range(STEPS):
            with pace.step():
                self.engine.step(plan)
        return (process_time() - began) / STEPS


class Stream:
    """Copies one after the other, from `start` to `stop`; each begins when the one before has ended."""

    def __init__(self, begin: Callable[[Callable[[object], None]], None]) -> None:
        self._begin = begin
        self._goes_on, self._ended = False, Event()
        self.count = 0

    def start(self) -> None:
        self.count, self._goes_on = 0, True
        self._ended.clear()
        self._begin(self._one_done)

    def stop(self) -> None:
        self._goes_on = False
        self._ended.wait()

    def _one_done(self, _: object) -> None:
        self.count += 1
        if self._goes_on:
            self._begin(self._one_done)
        else:
            self._ended.set()


def prefetches(bench: Bench, pace: Pace) -> Stream:
    """Page after page, from the arena, as copies aside."""
    aside = AsideCopies(PAGE, pace)
    aside.attach(bench.new_copier(), POOL)
    order = CopyIn(1, POOL, bench.pages[:1], bench.there, TOKENS[:PAGE], aside=True)

    def begin(done: Callable[[CopiedIn | CopiedOut], None]) -> None:
        aside.add(order, done)

    return Stream(begin)


def beside(bench: Bench, plan: StepPlan, pace: Pace, stream: Stream, rounds: int) -> tuple[float, float, float]:
    """How much more a step takes with what is copied beside it, as a share; what it takes alone; and copies per second
    of steps."""
    longer, alone, copied, took = [], [], 0, 0.0
    bench.seconds(plan, pace)
    for turn in range(rounds):
        seconds = {}
        for with_copies in (turn % 2 == 0, turn % 2 == 1):  # which is first takes turns
            if with_copies:
                stream.start()
            before = stream.count
            seconds[with_copies] = bench.seconds(plan, pace)
            if with_copies:
                copied += stream.count - before
                stream.stop()
        took += STEPS * seconds[False]
        longer.append(seconds[True] / seconds[False] - 1)
        alone.append(seconds[False])
    return median(longer), median(alone), copied / took


def speeds(pieces: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """The fewest seconds of each, all in turn."""
    took: dict[str, list[float]] = {name: [] for name in pieces}
    for number in range(rounds + 1):
        for name, piece in pieces.items():
            began = perf_counter()
            piece()
            if number:  # the first round connects and warms up
                took[name].append(perf_counter() - began)
    return {name: min(times) for name, times in took.items()}


@contextmanager
def setting() -> Iterator[Bench]:
    """All that a figure needs, in memory of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    peer = context.Process(target=send_for_ever, args=(theirs,), daemon=True)
    with TemporaryDirectory(dir="/dev/shm") as directory:
        folder = MAKERS["llama160m"](Path(directory) / "model")
        engine = Engine(folder, num_pairs=NUM_PAIRS, block_size=BLOCK, dtype="bfloat16")
        engine.cache.normal_()
        pages, payload_bytes = LENGTH // PAGE, PAGE * TOKEN_BYTES
        path = Path(directory) / "arena"
        arena = Arena.create(path, pages=pages, payload_bytes=payload_bytes, page_size=PAGE, incarnation=1)
        with closing(arena):
            has_gloo = why_no_gloo() is None
            if has_gloo:
                peer.start()
            try:
                bench = Bench(engine, arena, ours if has_gloo else None)
                yield bench
            finally:
                if has_gloo:
                    peer.kill()
                    peer.join()


def measure(bench: Bench, rounds: int) -> bool:
    pieces: dict[str, Callable[[], None]] = {"memcpy": bench.memcpy, "out": bench.out, "back": bench.back}
    with_peer = bench._transport is not None
    if with_peer:
        pieces["collective"] = bench.receive
    took = speeds(pieces, rounds)
    request = LENGTH * TOKEN_BYTES / 1e9
    memcpy = request / took["memcpy"]
    report("memcpy", memcpy, "GB/s")
    report("transport host, out and in", request / (took["out"] + took["back"]), "GB/s", baseline=memcpy)
    if with_peer:
        report("transport collective, Gloo", request / took["collective"], "GB/s", baseline=memcpy)

    page = PAGE * TOKEN_BYTES / 1e9
    prompts, decodes = bench.prompt_step(), bench.decode_step()
    longer, alone, copies = beside(bench, prompts, bench.pace, prefetches(bench, bench.pace), rounds)
    report(f"a prompt step of {PROMPT} tokens", alone * 1e3, "ms")
    met = report("prompt step beside prefetches, longer by", longer, "1", goal=GOAL)
    report("prefetched meanwhile", copies * page, "GB/s", baseline=memcpy)
    longer, _, copies = beside(bench, prompts, bench.unpaced, prefetches(bench, bench.unpaced), rounds)
    report("the same without a pace, longer by", longer, "1")
    report("prefetched meanwhile without a pace", copies * page, "GB/s", baseline=memcpy)

    longer, alone, _ = beside(bench, decodes, bench.pace, prefetches(bench, bench.pace), rounds)
    report(f"a decode step of {BATCH} requests", alone * 1e3, "ms")
    report("join of a request that was not prefetched, of a decode step", took["back"] / alone, "1")
    if with_peer:
        stream = Stream(bench.receive)
        longer, _, copies = beside(bench, decodes, bench.pace, stream, rounds)
        met &= report("join of one that was: a decode step beside its arrival, longer by", longer, "1", goal=GOAL)
    return met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="of each figure (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # of more, core time says less
    with setting() as bench:
        met = measure(bench, args.rounds)
    sys.exit(not met)


if __name__ == "__main__":
    main()
