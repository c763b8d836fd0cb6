"""Measure chats beside saturating documents, packed by different presets, on workers that are short of memory.

    python -m lab.benchmarks.packing [--rates 1,2,3] [--documents 16] [--seeds 0,1,2] [--ttft 1] [--tbt 0.1875]
        [--pairs 910] [--hidden-us 35] [--presets fcfs,slack,...]
    python -m lab.benchmarks.packing --backend real [--models demo,llama160m,opt125m] [--rates 1,2] [--seconds 10]
        [--tokens 6000] [--presets fcfs,...] [-- SERVE FLAGS]

The simulated worker is `usual` of common/machines.py. The real models are the demo model and random weights
of a 160 M Llama and of OPT-125M, each colocated, with KV for `--tokens` tokens; the demo model gets ten times as many
chats, and OPT runs once more with its hybrid cache. The load (common/chats.py) is the same for every preset.
The goal is that of docs/how/packing.md: the default has at least twice the attainment of fcfs, where fcfs has 30-45 %,
and at least nine tenths of its BE tokens/s.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.model_source import DEMO_FOLDER
from alignedserve.lab.benchmarks.common.chats import DEFAULT, Backend, Load, Promise, Run, Served, Simulated
from alignedserve.lab.benchmarks.common.machines import MACHINES, save_profile
from alignedserve.lab.benchmarks.common.models import MAKERS
from alignedserve.lab.benchmarks.common.report import command, report, several, status
from alignedserve.lab.benchmarks.common.serving import serve
from alignedserve.loads.records.distribution import percentile

_SIMULATED = ("vllm-chunked", "round-robin", "mlfq", "aligned", "bros-plain")  # presets, beside fcfs
_REAL, _HYBRID = ("round-robin", "aligned", "aligned-shared"), "aligned-hybrid"
_MIB = 1 << 20


@dataclass(frozen=True)
class Lot:
    """Presets to compare on one machine or model."""

    label: str  # the beginning of its figures' names
    presets: list[str]
    speed: float = 1.0  # factor of the rate of chats
    folder: Path = Path()  # folder of the model


def tell(label: str, run: Run, fcfs: Run, promise: Promise, *, is_ours: bool) -> None:
    attained, fcfs_attained = run.attained(promise), fcfs.attained(promise)
    has_goal = is_ours and 30 <= fcfs_attained <= 45
    goals = (2 * fcfs_attained, 0.9 * fcfs.tokens_s) if has_goal else (None, None)
    report(f"{label}: attained", attained, "%", baseline=fcfs_attained, goal=goals[0], at_least=True)
    report(f"{label}: BE", run.tokens_s, "tokens/s", baseline=fcfs.tokens_s, goal=goals[1], at_least=True)
    report(f"{label}: tokens in time", run.in_time(promise), "%")
    for name, values in (("TTFT", run.ttfts), ("TBT", run.gaps)):
        if values:
            for of, value in (("mean", mean(values)), ("p50", percentile(values, 50)), ("p99", percentile(values, 99))):
                report(f"{label}: {name} {of}", 1e3 * value, "ms")
    asked = [*run.chats, *run.documents]
    report(f"{label}: refused or failed", sum(not answer.is_whole for answer in asked), "1")
    if run.num_preempted is not None:
        report(f"{label}: preemptions", run.num_preempted, "1")


def lots(args: argparse.Namespace, scratch: Path) -> Iterator[Lot]:
    if args.backend == "simulated":
        machine = MACHINES["usual"]
        machine = replace(machine, limits=replace(machine.limits, num_pairs=args.pairs))
        save_profile(scratch / "steps.json", machine, hidden_s=args.hidden_us / 1e6)
        yield Lot("", list(args.presets or _SIMULATED))
        return
    for name in args.models:
        presets = [*(args.presets or _REAL), *([_HYBRID] if name == "opt125m" else [])]
        if name == "demo":
            yield Lot(f"{name}, ", presets, 10.0, DEMO_FOLDER)
        else:
            yield Lot(f"{name}, ", presets, 1.0, MAKERS[name](scratch / name))


@contextmanager
def backend(args: argparse.Namespace, lot: Lot, preset: str, scratch: Path) -> Iterator[Backend]:
    if args.backend == "simulated":
        yield Simulated(scratch / "steps.json", args.seeds, preset)
        return
    config = read_config(lot.folder)
    kv_mb = -(-args.tokens * config.kv_bytes(1, config.dtype) // _MIB)
    with serve(lot.folder, "--preset", preset, "--kv-memory-mb", str(kv_mb), *args.flags) as deployment:
        yield Served(deployment.url, config.vocab_size)


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--backend", choices=("simulated", "real"), default="simulated", help="default: %(default)s")
    parser.add_argument("--rates", type=several(float), help="chats per second (default: 1,2,3, or 1,2 if real)")
    parser.add_argument("--documents", type=int, default=16, help="documents in flight")
    parser.add_argument("--presets", type=several(str), help="presets beside fcfs")
    parser.add_argument("--seconds", type=float, help="seconds of arrivals in each run (default: 40, or 10 if real)")
    parser.add_argument("--ttft", type=float, default=1.0, help="promised TTFT of chats, in seconds")
    parser.add_argument("--tbt", type=float, default=0.1875, help="promised TBT, in seconds")
    parser.add_argument("--seeds", type=several(int), default=[0, 1, 2], help="simulated")
    pairs = MACHINES["usual"].limits.num_pairs
    parser.add_argument("--pairs", type=int, default=pairs, help="simulated: memory, in pairs of 16 tokens")
    parser.add_argument(
        "--hidden-us", type=float, default=35.0, help="simulated: microseconds to make K and V of a hidden token"
    )
    parser.add_argument("--models", type=several(str), default=["demo", "llama160m", "opt125m"], help="real")
    parser.add_argument("--tokens", type=int, default=6000, help="real: tokens of KV memory")
    parser.add_argument("flags", nargs="*", help="real: more flags for `alignedserve serve`, after --")
    args = parser.parse_args()
    is_real = args.backend == "real"
    promise = replace(DEFAULT, ttft_s=args.ttft, tbt_s=args.tbt)
    with TemporaryDirectory() as name:
        for lot in lots(args, Path(name)):
            fcfs = dict[float, Run]()
            for preset in dict.fromkeys(["fcfs", *lot.presets]):
                with backend(args, lot, preset, Path(name)) as measured:
                    for rate in args.rates or ((1.0, 2.0) if is_real else (1.0, 2.0, 3.0)):
                        load = Load(lot.speed * rate, args.seconds or (10.0 if is_real else 40.0), args.documents)
                        run = measured.run(load, promise)
                        label = f"{lot.label}{preset}, {load.rate:g}/s"
                        tell(label, run, fcfs.setdefault(rate, run), promise, is_ours=preset == "aligned")
    sys.exit(status())


if __name__ == "__main__":
    main()
