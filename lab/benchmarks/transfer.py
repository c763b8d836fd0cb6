"""Measure how fast KV moves between the devices of two workers, and how much it slows steps meanwhile.

    python -m lab.benchmarks.transfer                # about a minute
    python -m lab.benchmarks.transfer --rounds 200   # steadier, on a busy machine

A model with 12 layers and 768-wide K and V in bf16 (36 KB for a token), requests of 512 tokens, pages of 64. `host` is
copy out and copy in through an arena; `collective` is a second process that sends over Gloo, `ipc` a third whose device
cache is mapped and read here; all are timed in turn with memcpy of the same number of bytes, and a figure is the best.
Then steps of an engine of that size run in rows, in turn alone and beside copies. The comparison is of the processor
time of the whole process, including the copies, as if copies had no core but the step's; other work on the machine does
not count. The figure is the median over the pairs of how much longer the second took. The exit status is 1 if a goal is
missed.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import queue
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Event
from time import process_time

import torch

from alignedserve.core import Chunk, Decode, Role, Sampling, StepPlan
from alignedserve.engine.copying.aside import AsideCopies
from alignedserve.engine.copying.copies import PageCopier
from alignedserve.engine.device import large_pages
from alignedserve.engine.device.groups import why_no_gloo
from alignedserve.engine.device.pace import CopyPace
from alignedserve.engine.engine import Engine
from alignedserve.kvpool.arena.arena import Arena
from alignedserve.lab.benchmarks.common.models import MAKERS, VOCAB
from alignedserve.lab.benchmarks.common.report import command, report, status
from alignedserve.lab.benchmarks.common.timing import in_turns
from alignedserve.lab.benchmarks.copies import arena_of
from alignedserve.protocol.commands import CopyIn, ReceiveKv, SendKv
from alignedserve.protocol.events import CopiedIn, CopiedOut, KvReceived
from alignedserve.protocol.messages import Member
from alignedserve.transport.direct import Direct
from alignedserve.transport.mapping import CacheFile
from alignedserve.transport.payload import DeviceBlocks
from alignedserve.transport.transport import Outcome

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
COLLECTIVE, IPC = "collective, Gloo", "ipc"


def member(name: str, transport: Direct) -> Member:
    return Member(name, Role(name.partition("-")[0]), "local", 1, "", transport.address)


def direct(name: str, cache: torch.Tensor, pace: CopyPace, maps: CacheFile | None) -> Direct:
    blocks = DeviceBlocks(cache)
    return Direct(f"{name}.1", "127.0.0.1", blocks, pace, verify=False, timeout_s=TIMEOUT_S, maps=maps)


def send_for_ever(to_us: Connection, shared: Path | None) -> None:
    """Run another process: a prefill worker that sends whatever is asked for, or lets it be read."""
    torch.set_num_threads(1)
    shape = torch.Size((LAYERS, 4 * EACH, BLOCK, KV_DIM))
    maps = CacheFile(shared, "source", "source") if shared is not None else None
    zeros = maps.zeros(shape, torch.bfloat16) if maps is not None else large_pages.zeros(shape, torch.bfloat16)
    with closing(direct("prefill-0", zeros.normal_(), CopyPace(), maps)) as transport:
        to_us.send(asdict(member("prefill-0", transport)))
        fields = to_us.recv()
        transport.meet(Member(**(fields | {"role": Role(fields["role"])})))
        sent: queue.Queue[Outcome] = queue.Queue()
        for number in range(1, MOST_TRANSFERS):
            transport.start(SendKv(number, "decode-0.1", tuple(range(EACH)), TOKENS), sent.put)
            if number > 4:  # a few are under way
                sent.get()


class Bench:
    """An engine with an arena and peers; its cache's first pairs are those of the steps."""

    def __init__(self, engine: Engine, arena: Arena, peers: Mapping[str, Connection], shared: Path) -> None:
        self.engine, self._arena = engine, arena
        self.pace, self.unpaced = CopyPace(), CopyPace(share=1.0)
        self._anywhere = random.Random(2).sample(range(NUM_PAIRS // 2, NUM_PAIRS), 2 * EACH)
        self.pages = tuple(range(LENGTH // PAGE))
        self.copier = self.new_copier()
        self._posted: queue.Queue[Outcome] = queue.Queue()
        self._numbers = dict.fromkeys(peers, 0)
        self.transports: dict[str, Direct] = {}
        for how, peer in peers.items():
            maps = CacheFile(shared, "source", "ours") if how == IPC else None
            transport = self.transports[how] = direct("decode-0", engine.cache, self.pace, maps)
            fields = peer.recv()
            transport.meet(Member(**(fields | {"role": Role(fields["role"])})))
            peer.send(asdict(member("decode-0", transport)))

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

    def receive(self, how: str, done: Callable[[Outcome], None] | None = None) -> None:
        """Receive the next request from that peer, and wait for it unless `done` hears of it."""
        self._numbers[how] += 1
        number = self._numbers[how]
        order = ReceiveKv(number, "prefill-0.1", self.there, TOKENS)
        self.transports[how].start(order, done or self._posted.put)
        if done is None and self._posted.get() != KvReceived(number, "prefill-0.1", intact=True):
            raise SystemExit("a transfer failed: these figures mean nothing")

    def prompt_step(self) -> StepPlan:
        return StepPlan(1, (Chunk("prompt", TOKENS[:PROMPT], 0, tuple(range(PROMPT // BLOCK)), Sampling()),))

    def decode_step(self) -> StepPlan:
        each = PREFIX // BLOCK + 1
        pairs = [tuple(range(at * each, (at + 1) * each)) for at in range(BATCH)]
        return StepPlan(1, (), tuple(Decode(f"{i}", 5, PREFIX, pairs[i], Sampling(), 1) for i in range(BATCH)))

    def seconds(self, plan: StepPlan, pace: CopyPace) -> float:
        """Return the seconds of a step, over several steps in a row."""
        began = process_time()
        for _ in range(STEPS):
            with pace.step():
                self.engine.step(plan)
        return (process_time() - began) / STEPS


class Stream:
    """Copies in a row, from `start` to `stop`: each begins when the copy before has ended."""

    def __init__(self, begin: Callable[[Callable[[object], None]], None]) -> None:
        self._begin = begin
        self._is_running, self._ended = False, Event()
        self.count = 0

    def start(self) -> None:
        self.count, self._is_running = 0, True
        self._ended.clear()
        self._begin(self._copy_done)

    def stop(self) -> None:
        self._is_running = False
        self._ended.wait()

    def _copy_done(self, _: object) -> None:
        self.count += 1
        if self._is_running:
            self._begin(self._copy_done)
        else:
            self._ended.set()


def prefetches(bench: Bench, pace: CopyPace) -> Stream:
    """Return a stream of prefetches of single pages from the arena, as copies beside steps."""
    aside = AsideCopies(PAGE, pace)
    aside.attach(bench.new_copier(), POOL)
    order = CopyIn(1, POOL, bench.pages[:1], bench.there, TOKENS[:PAGE], aside=True)

    def begin(done: Callable[[CopiedIn | CopiedOut], None]) -> None:
        aside.add(order, done)

    return Stream(begin)


def beside(bench: Bench, plan: StepPlan, pace: CopyPace, stream: Stream, rounds: int) -> tuple[float, float, float]:
    """Return the slowdown of a step beside copies, as a share; its seconds alone; and copies per second of steps."""
    longer, alone, copied, took = [], [], 0, 0.0
    bench.seconds(plan, pace)
    for turn in range(rounds):
        seconds = {}
        for with_copies in (turn % 2 == 0, turn % 2 == 1):  # the order alternates
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


@contextmanager
def setting() -> Iterator[Bench]:
    """Make the engine, the arena and the peers of a figure, in separate memory."""
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory(dir="/dev/shm") as directory:
        folder = MAKERS["llama160m"](Path(directory) / "model")
        engine = Engine(folder, num_pairs=NUM_PAIRS, block_size=BLOCK, dtype="bfloat16")
        engine.cache.normal_()
        with arena_of(LENGTH // PAGE, PAGE * TOKEN_BYTES) as arena:
            peers, ends = [], {}
            for how in (COLLECTIVE, IPC) if why_no_gloo() is None else ():
                ends[how], peer_end = context.Pipe()
                args = (peer_end, Path(directory) if how == IPC else None)
                peers.append(context.Process(target=send_for_ever, args=args, daemon=True))
                peers[-1].start()
            try:
                yield Bench(engine, arena, ends, Path(directory))
            finally:
                for peer in peers:
                    peer.kill()
                    peer.join()


def measure(bench: Bench, rounds: int) -> None:
    pieces: dict[str, Callable[[], None]] = {"memcpy": bench.memcpy, "out": bench.out, "back": bench.back}
    pieces |= {how: partial(bench.receive, how) for how in bench.transports}
    took = {name: min(times[1:]) for name, times in in_turns(pieces, least=rounds + 1).items()}  # the first connects
    request = LENGTH * TOKEN_BYTES / 1e9
    memcpy = request / took["memcpy"]
    report("memcpy", memcpy, "GB/s")
    report("transport host, out and in", request / (took["out"] + took["back"]), "GB/s", baseline=memcpy)
    for how in bench.transports:
        report(f"transport {how}", request / took[how], "GB/s", baseline=memcpy)

    page = PAGE * TOKEN_BYTES / 1e9
    prompts, decodes = bench.prompt_step(), bench.decode_step()
    longer, alone, copies = beside(bench, prompts, bench.pace, prefetches(bench, bench.pace), rounds)
    report(f"a prompt step of {PROMPT} tokens", alone * 1e3, "ms")
    report("prompt step beside prefetches, longer by", longer, "1", goal=GOAL)
    report("prefetched meanwhile", copies * page, "GB/s", baseline=memcpy)
    longer, _, copies = beside(bench, prompts, bench.unpaced, prefetches(bench, bench.unpaced), rounds)
    report("the same without a pace, longer by", longer, "1")
    report("prefetched meanwhile without a pace", copies * page, "GB/s", baseline=memcpy)

    longer, alone, _ = beside(bench, decodes, bench.pace, prefetches(bench, bench.pace), rounds)
    report(f"a decode step of {BATCH} requests", alone * 1e3, "ms")
    report("join of a request that was not prefetched, of a decode step", took["back"] / alone, "1")
    for how in bench.transports:
        longer, _, copies = beside(bench, decodes, bench.pace, Stream(partial(bench.receive, how)), rounds)
        name = f"join of a request that was: a decode step beside its arrival by {how}, longer by"
        report(name, longer, "1", goal=GOAL)


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="of each figure")
    args = parser.parse_args()
    torch.set_num_threads(1)  # of more, core time says less
    with setting() as bench:
        measure(bench, args.rounds)
    sys.exit(status())


if __name__ == "__main__":
    main()
