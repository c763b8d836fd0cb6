"""Measure what long contexts hold where all layers have a window: `python -m lab.benchmarks.sliding_windows`, a minute.

    python -m lab.benchmarks.sliding_windows [--tokens 8192] [--window 1024] [--output 64] [--cores-only]

A prompt of --tokens runs on a prefill worker, is committed to the pool, joins a decode worker and decodes: real cores,
engines and arena in one process, with random weights of 160 M as a Mistral. The figures are the most tokens that it
holds on each device and in the pool; the baseline is all of them. A prompt holds its chunk too, and a request up to a
page more.

Then 16 documents of that length come to the core of a decode worker with memory for eight windows: the next figure is
how many decode at once, and how many would if they held all. They decode as long as their prompts take.

The last figures are of models where some layers have the window: with one in five of six layers six pairs behind it are
folded into one, as in Gemma 3, and with one in every other layer two, as in gpt-oss. Where three of four layers have
stretches of that length four are, as in Llama 4. They say what a document holds while it decodes, what the router
counts for it, and how many of 16 decode at once with memory for four that hold all.
`--tokens 32768 --window 4096` is the usual size, and takes several minutes: it is the prompt that takes them, and
`--cores-only` leaves out the figures that it is needed for.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from alignedserve.core import Estimate, Fold, Role, ServiceClass, Sight, StepResult, WorkerLimits, units_for
from alignedserve.decode_worker.state import DecodeCore
from alignedserve.engine.engine import Engine
from alignedserve.executor.hands import EngineHands
from alignedserve.kvpool.arena.arena import Arena
from alignedserve.kvpool.arena.extents import Extents, PageBytes
from alignedserve.kvpool.state import PoolCore
from alignedserve.lab.benchmarks.common.models import mistral160m
from alignedserve.lab.benchmarks.common.report import command, report, status
from alignedserve.lab.benchmarks.common.requests import request
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.protocol.commands import Command, CopyIn, CopyOut, RunStep, Send
from alignedserve.protocol.events import Event, MemberJoined, Received, StepDone
from alignedserve.protocol.messages import ROUTER, Member, Prefill
from alignedserve.router.placing.holdings import Holdings
from alignedserve.scheduling.policy import DEFAULT_POLICY
from alignedserve.worker.setup import WorkerSetup

BLOCK, PAGE, STEP, BATCH = 16, 64, 512, 32
POOL, PREFILL, DECODE = "pool-0", "prefill-0", "decode-0"
WINDOWS, FOUR, DOCUMENTS, SEED, STEP_S = 8, 4, 16, 1, 0.01


@dataclass
class Held:
    """The most tokens that a request held."""

    prefill: int = 0
    pool: int = 0
    decode: int = 0


@dataclass
class OneRequest:
    """A request on its way through a prefill worker, the pool and a decode worker."""

    cores: Mapping[str, PrefillCore | PoolCore | DecodeCore]
    hands: Mapping[str, EngineHands]
    held: Held = field(default_factory=Held)
    now: float = 0.0

    def tell(self, to: str, event: Event) -> None:
        """Tell a core, and go on until nothing is left to do."""
        said = deque([(to, event)])
        while said:
            by, event = said.popleft()
            for order in self.cores[by].handle(event, self.now):
                said += self._follow(by, order)
            self._look()

    def _follow(self, by: str, order: Command) -> list[tuple[str, Event]]:
        match order:
            case Send(to, message) if to in self.cores:
                return [(to, Received(by, message, 1))]
            case RunStep() | CopyOut() | CopyIn():
                done = self.hands[by].perform(order)
                self.now += STEP_S
                return [] if done is None else [(by, done)]
        return []

    def _look(self) -> None:
        prefill, pool, decode = (self.cores[name] for name in (PREFILL, POOL, DECODE))
        self.held.prefill = max(self.held.prefill, BLOCK * prefill.held["pairs"])
        self.held.pool = max(self.held.pool, PAGE * pool.held["pages"])
        self.held.decode = max(self.held.decode, BLOCK * decode.held["pairs"])


def held_by_one(folder: Path, tokens: int, output: int, reach: int | None, directory: Path) -> Held:
    pairs = units_for(tokens + output, BLOCK) + 1
    setup = WorkerSetup(WorkerLimits(pairs, BLOCK, PAGE, STEP, BATCH, reach), root=b"model")
    extents, path = Extents(units_for(tokens + output, PAGE) * 2), directory / "arena"
    cores: dict[str, PrefillCore | PoolCore | DecodeCore] = {
        PREFILL: PrefillCore(setup),
        POOL: PoolCore(extents, BLOCK),
        DECODE: DecodeCore(setup),
    }
    engines = {name: Engine(folder, num_pairs=pairs, block_size=BLOCK) for name in (PREFILL, DECODE)}
    config, dtype = engines[PREFILL].config, str(engines[PREFILL].dtype).removeprefix("torch.")
    sizes = PageBytes(config.kv_bytes(PAGE, dtype))
    arena = Arena.create(path, pages=extents, payload_bytes=sizes, page_size=PAGE, incarnation=1)
    hands = {name: EngineHands(engine, path, PAGE, True) for name, engine in engines.items()}
    one, members = OneRequest(cores, hands), {POOL: Role.POOL, PREFILL: Role.PREFILL, DECODE: Role.DECODE}
    for name in cores:
        for other, role in members.items():
            member = Member(other, role, "local", 1, "")
            if name in hands and role is Role.POOL:
                hands[name].meet(member)
            if other != name:
                one.tell(name, MemberJoined(member))
    random = Random(SEED)
    prompt = [random.randrange(3, config.vocab_size) for _ in range(tokens)]
    document = request("long", prompt, output, service=ServiceClass.BE)
    one.tell(PREFILL, Received(ROUTER, Prefill(document), 1))
    for worker_hands in hands.values():
        worker_hands.part_from(Member(POOL, Role.POOL, "local", 1, ""))
    arena.close()
    return one.held


@dataclass
class AtOnce:
    """The most documents that decoded at once, and the least tokens' worth that the last of them held."""

    decodes: int = 0
    held: int = 0


def decodes_at_once(tokens: int, window: int, reach: int | None) -> int:
    """Return the most documents that decode at once with memory for some windows, or for one document if it needs
    more."""
    pairs = max(WINDOWS * units_for(window, BLOCK), units_for(tokens + _output(tokens), BLOCK) + 1)
    return run_documents(tokens, WorkerLimits(pairs, BLOCK, PAGE, STEP, BATCH, reach)).decodes


def _output(tokens: int) -> int:
    """Return how many tokens documents of this length decode: else the first end before the last begin."""
    return DOCUMENTS * units_for(tokens, STEP)


def run_documents(tokens: int, limits: WorkerLimits, documents: int = DOCUMENTS) -> AtOnce:
    """Run documents on a decode worker's core; no engine runs the steps."""
    core, now, found, output = DecodeCore(WorkerSetup(limits)), 0.0, AtOnce(), _output(tokens)
    orders = deque[Command]()
    for number in range(documents):
        document = request(f"d{number}", [number + 3] * tokens, output, service=ServiceClass.BE)
        orders += core.handle(Received(ROUTER, Prefill(document), 1), now)
    while orders:
        if isinstance(order := orders.popleft(), RunStep):
            now, found.decodes = now + STEP_S, max(found.decodes, len(order.plan.decodes))
            for decode in order.plan.decodes:
                found.held = BLOCK * len(decode.pairs)
            sampled = tuple((part.request, 5) for part in order.plan.parts if part.sampling is not None)
            orders += core.handle(StepDone(StepResult(order.plan.number, sampled), STEP_S), now)
    return found


def counted_by_router(tokens: int, limits: WorkerLimits) -> int:
    """Return how many tokens of memory the router expects a document to hold whose output it knows."""
    output = _output(tokens)
    document = request("d", [3] * tokens, output, service=ServiceClass.BE)
    holdings = Holdings(DEFAULT_POLICY, limits.retention)
    holdings.put(replace(document, estimate=Estimate(output, output)))
    return holdings.tokens


def main() -> int:
    parser = command(__doc__)
    parser.add_argument("--tokens", type=int, default=8192, help="of the context")
    parser.add_argument("--window", type=int, default=1024, help="of all layers, in tokens")
    parser.add_argument("--output", type=int, default=64, help="tokens that are decoded")
    parser.add_argument("--cores-only", action="store_true", help="leave out what engines are needed for")
    asked = parser.parse_args()
    if not asked.cores_only:
        report_one_request(asked.tokens, asked.window, asked.output)
    report_documents(asked.tokens, asked.window)
    return status()


def report_one_request(tokens: int, window: int, output: int) -> None:
    with TemporaryDirectory(prefix="windows", dir="/dev/shm") as name:
        directory = Path(name)
        folder = mistral160m(directory / "model", window, tokens + output)
        held = held_by_one(folder, tokens, output, window, directory)
    most, all_of_it = window + PAGE, float(tokens + output)
    about = f"a context of {tokens} on a window of {window}"
    report(f"{about}: most tokens held by its prompt", held.prefill, "tokens", baseline=all_of_it, goal=most + STEP)
    report(f"{about}: in the pool", held.pool, "tokens", baseline=all_of_it, goal=most)
    report(f"{about}: while it decodes", held.decode, "tokens", baseline=all_of_it, goal=most)


def report_documents(tokens: int, window: int) -> None:
    most = window + PAGE
    windowed, whole = (decodes_at_once(tokens, window, reach) for reach in (window, None))
    name = f"decodes at once with memory for {WINDOWS} windows"
    report(name, windowed, "decodes", baseline=whole, goal=WINDOWS * window // most, at_least=True)
    for layers, sight, pairs in (
        ("a window of {} in five of six layers", Sight(window), 6),
        ("a window of {} in every other layer", Sight(window), 2),
        ("stretches of {} in three of four layers", Sight(stretch=window), 4),
    ):
        limits = WorkerLimits(FOUR * units_for(tokens, BLOCK), BLOCK, PAGE, STEP, BATCH)
        folding = replace(limits, fold=Fold(sight, pairs))
        alone = run_documents(tokens, folding, documents=1)
        whole_of_it = float(tokens + _output(tokens))
        share = window + (whole_of_it - window) / pairs + BLOCK * (pairs + 1)
        about = f"a context of {tokens} on {layers.format(window)}"
        report(f"{about}: while it decodes", alone.held, "tokens", baseline=whole_of_it, goal=share)
        counted = counted_by_router(tokens, folding)
        report(f"{about}: counted by the router", counted, "tokens", baseline=counted_by_router(tokens, limits))
        folded, whole = (run_documents(tokens, each).decodes for each in (folding, limits))
        report(f"{about}: decodes at once with memory for {FOUR}", folded, "decodes", baseline=whole, at_least=True)


if __name__ == "__main__":
    sys.exit(main())
