"""Compare `aligned` with every other preset in the simulator: three workloads at three loads, on two GPUs.

docs/reference/presets.md has the tables that this benchmark prints.

    python -m lab.benchmarks.presets [--seeds 0,1,2] [--workloads chat,coserve,long] [--presets aligned,orca]
    python -m lab.benchmarks.presets --table FILE

It prints a JSON line for each run; --table prints the means of these lines as markdown. Presets that separate prompts
from decodes run as 1+1, all others as 2xcolocated, `aligned` as both; on RTX 4090 with Llama-3.1-8B, which is short of
memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from time import perf_counter

from alignedserve.config.config import of_preset
from alignedserve.config.presets import PRESETS
from alignedserve.config.topology import Topology
from alignedserve.lab.benchmarks.common.report import command, print_line, several
from alignedserve.lab.benchmarks.common.simulating import record_of
from alignedserve.lab.reports.figures import RunFigures
from alignedserve.lab.reports.trial import SimulationTrial

_GPU = "rtx4090-llama-3.1-8b-tp1"
_FIGURES = {
    "rt_attainment": "rt.attainment",
    "be_tokens_per_s": "be.tokens_per_s",
    "goodput": "papers.accelgen.goodput",
    "refused": "requests.refused",
    "preemptions": "requests.preemptions",
    "ttft_p99_s": "rt.ttft_s.p99",
    "tbt_p99_s": "rt.tbt_s.p99",
}
# Presets with a part turned off or another cache: other pages show them.
_ABLATIONS = ("-no-", "-int8", "-hybrid", "shortest")


@dataclass(frozen=True)
class Lot:
    workload: str
    rates: tuple[float, ...]  # chats per second


LOTS = {
    "chat": Lot("chat,first_s=20,num_requests=100000", (6.0, 12.0, 18.0)),
    "coserve": Lot("coserve,first_s=20,documents.in_flight=64,documents.max_tokens=128", (3.0, 6.0, 9.0)),
    "long": Lot("mix:short=0.9,first_s=20,short_prompt=10-512,long_prompt=2000-8000,max_tokens=1024", (2.0, 4.0, 6.0)),
}


def clusters(preset: str) -> tuple[str, ...]:
    if preset.startswith("aligned") and not preset.startswith("alignedserve"):
        return ("2xcolocated", "1+1")
    return ("2xcolocated",) if of_preset(preset, {}).topology == Topology() else ("1+1",)


def compared() -> list[str]:
    """Return the presets, without those that keep hidden vectors: for this model they are larger than K and V."""
    hybrid = [name for name in PRESETS if of_preset(name, {}).policy.pairs.keeps_hidden]
    return [name for name in PRESETS if name not in hybrid and not any(part in name for part in _ABLATIONS)]


def runs(presets: Sequence[str], lots: Sequence[str], seeds: Sequence[int]) -> Iterator[tuple[str, SimulationTrial]]:
    """Yield the runs, all presets of a load and seed in a row: a benchmark that is stopped early leaves whole rows."""
    for number, seed in enumerate(seeds):
        for lot in lots:
            for rate in LOTS[lot].rates:
                for preset in presets[::-1] if number % 2 else presets:
                    for cluster in clusters(preset):
                        yield lot, SimulationTrial(preset, LOTS[lot].workload, cluster, seed, rate, _GPU)


def measured_line(lot: str, trial: SimulationTrial) -> dict[str, object]:
    began_at = perf_counter()
    record = record_of(trial)
    figures = RunFigures.from_record(record)
    line: dict[str, object] = {"name": f"presets/{lot}", "preset": trial.preset, "cluster": trial.cluster}
    line |= {"rate": trial.rate, "seed": trial.seed, "requests": len(record.requests)}
    line |= {key: figures.at(path) for key, path in _FIGURES.items()}
    return line | {"wall_s": round(perf_counter() - began_at, 1)}


# --- The table


def table(lines: Iterable[dict[str, object]]) -> str:
    """Return a table of RT attainment, BE tokens/s and goodput, each a mean over the seeds."""
    cells: dict[tuple[str, str, str, float], list[dict[str, object]]] = {}
    for line in lines:
        lot, rate = str(line["name"]).partition("/")[2], float(str(line["rate"]))
        cells.setdefault((lot, str(line["preset"]), str(line["cluster"]), rate), []).append(line)
    return "\n\n".join(_workload_table(lot, cells) for lot in dict.fromkeys(key[0] for key in cells))


def _workload_table(lot: str, cells: dict[tuple[str, str, str, float], list[dict[str, object]]]) -> str:
    rates = sorted({rate for name, _, _, rate in cells if name == lot})
    rows = dict.fromkeys((preset, cluster) for name, preset, cluster, _ in cells if name == lot)
    head = f"| `{lot}` | | " + " | ".join(f"{rate:g}/s" for rate in rates) + " |"
    shown = [
        f"| `{preset}` | {cluster} | "
        + " | ".join(_cell(cells.get((lot, preset, cluster, rate), ())) for rate in rates)
        + " |"
        for preset, cluster in rows
    ]
    return "\n".join([head, "|---" * (2 + len(rates)) + "|", *shown])


def _cell(lines: Sequence[dict[str, object]]) -> str:
    if not lines:
        return ""
    rt, be, goodput = ([float(str(line[key])) for line in lines] for key in list(_FIGURES)[:3])
    return f"{100 * mean(rt):.1f} %; {mean(be):.0f}; {mean(goodput):.2f}"


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--presets", type=several(str), default=compared(), help="default: all but ablations")
    parser.add_argument("--workloads", type=several(str, LOTS), default=list(LOTS), help="default: %(default)s")
    parser.add_argument("--seeds", type=several(int), default=[0, 1, 2], help="default: %(default)s")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the lines of earlier runs as a table")
    args = parser.parse_args()
    if args.table is not None:
        print(table(json.loads(line) for line in args.table.read_text(encoding="utf-8").splitlines()))
        return
    for lot, trial in runs(args.presets, args.workloads, args.seeds):
        print_line(measured_line(lot, trial))


if __name__ == "__main__":
    main()
