"""Measure what each rule of the default scheduler is worth: runs without it, against the same runs with it.

    python -m lab.benchmarks.rules --rules budget,gaps                # hours of a core for a rule with eight seeds
    python -m lab.benchmarks.rules --rules caution --mixes 'chats lots,tight' --clusters 1+1 --seeds 0,1

Each rule is one function, which is replaced by what it says where it has nothing to say. A rule that says nothing in a
run is not run without: what it is worth there is 0. Mixes are those of chat_loads.py, with fewer seconds: RTX 4090 with
Llama-3.1-8B, two colocated workers, or a prefill and a decode worker with 0.6 times their chats. `tight` and `rare` are
a CPU with promises of 0.3 s and 60 ms, to 4 chats a second and to one in 2 s.

    alone      chats at 1.5 times the capacity
    documents  at 0.7 times the capacity, beside 32 documents of 1,600 tokens in flight
    lots       at the capacity, beside lots of 32 shorter documents
    flood      short chats of one key, one in 2 s, with a promise of 0.2 s; beside another key's 64 chats in flight
    scarce     a CPU whose memory is too little for the answers of its chats and documents
    choices    8 answers to each prompt of 1,000 tokens (`n`), beside documents as above

A line for each rule and mix has the columns of common/columns.py with the rule, and what the rule brings, in points
or percent of each: the mean over the seeds, its error, and each seed; above 0 is better. In a flood the chats of the
first key count as chats, and the tokens of the other key as those of documents. Then a line for each rule and kind of
mixes has the same over all mixes of the kind, and a sentence says what the rule is worth. That is the mean over a kind,
or what it brings to mixes that the sentence names; never its best mix.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias
from unittest.mock import patch

from alignedserve.lab.benchmarks.common.chat_loads import ANSWERS, CHATS, ONE_PLUS_ONE, NamedLoad, loads
from alignedserve.lab.benchmarks.common.columns import FLOOD, Columns, columns_of, means
from alignedserve.lab.benchmarks.common.machines import GATEWAY_MS, MACHINES, save_profile
from alignedserve.lab.benchmarks.common.report import command, several
from alignedserve.lab.benchmarks.common.shifts import LIMITS, Shift, Shifts, shifts, together, verdict
from alignedserve.lab.benchmarks.common.simulating import of_each, record_of, save_load
from alignedserve.lab.reports.trial import SimulationTrial
from alignedserve.schedulers import aligned
from alignedserve.schedulers.near_lengths import NearLengths
from alignedserve.scheduling import dues
from alignedserve.scheduling.levels import Level
from alignedserve.worker.pace import ArrivalForecast
from alignedserve.worker.scheduler import Scheduler
from alignedserve.worker.step.context import StepContext
from alignedserve.worker.step.device_pages import NextPages
from alignedserve.worker.step.seating import RecentNeed

Function = Callable[..., Any]


def always(value: object) -> Callable[[Function], Function]:
    return lambda _real: lambda *_args: value


# A rule is a function of an object: the object, the function's name, and what replaces the function by one that does
# nothing.
SchedulingRule: TypeAlias = tuple[Any, str, Callable[[Function], Function]]


def one_pivot(at: StepContext) -> int:
    """Return the budget of prompt tokens without the factor: what saturates the hardware."""
    return max(at.block_size, at.pivot)


RULES: Mapping[str, SchedulingRule] = {
    "saturating documents": (aligned.Aligned, "documents_budget", lambda _real: lambda _self, step: step.budget),
    "after a slow step": (aligned, "after_slow_step_s", lambda _real: lambda bound, *_: bound),
    "few gaps": (aligned, "may_sacrifice_gaps", always(False)),
    "gaps": (aligned, "is_worth_gaps", always(False)),
    "documents decode first": (
        aligned,
        "first_decodes",
        lambda real: lambda *args: [running for running in real(*args) if running.promise.is_rt],
    ),
    "documents leave": (aligned.Aligned, "leaving", lambda _real: Scheduler.leaving),
    "budget": (aligned, "prompt_budget", lambda _real: lambda at: at.room),
    "memory stays free": (RecentNeed, "spare_blocks", always(0)),
    "chats to come": (ArrivalForecast, "bound_s", always(inf)),
    "chats handed on": (ArrivalForecast, "max_step_for_handoffs_s", always(inf)),
    "near lengths": (NearLengths, "choose", lambda _real: lambda _self, found, _view: found),
    "another key": (aligned, "unnoticed_s", always(inf)),
    "other callers alone": (aligned, "prompts_of_others", always(())),
    "factor of four": (aligned, "prompt_budget", lambda _real: one_pivot),
    "late decay": (dues, "decays", always(False)),
    "pages waited for": (NextPages, "holds_up", always(False)),
    "ageing": (Level, "num_ages", always(0)),
    "caution": (StepContext, "careful_s", lambda _real: lambda _self, bound_s, *_: bound_s),
}

DOCUMENTS = {
    "name": "documents",
    "service": "be",
    "prompt": "lognormal:1600:1200:8000",
    "output": "exp:150:600",
    "arrivals": "closed",
    "in_flight": 32,
    "replace": True,
    "num_requests": 100_000,
}
GUESTS = {
    "name": "chats",
    "caller": "ann",
    "prompt": "8-24",
    "output": "16-96",
    "rate": 0.5,
    "num_requests": 100_000,
    "ttft_s": 0.2,
}
FLOODED = {"name": FLOOD, "caller": "bob", "arrivals": "closed", "in_flight": 64, "replace": True}
CHOICES = 8  # answers to each prompt, of 1,000 tokens
SECONDS = 20
CLUSTERS = {"2xcolocated": 1.0, "1+1": ONE_PLUS_ONE}
SEEDS = tuple(range(8))  # three say nothing under 3 to 5 points
# What a mix's name has, and the kind of load that it is.
KINDS = {"alone": "alone", "documents": "documents", "lots": "documents", "choices": "documents", "flood": "floods"}


def kind_of(mix: str) -> str:
    return next((kind for word, kind in KINDS.items() if word in mix), "CPUs")


@dataclass(frozen=True)
class RuleOutcome:
    columns: Columns
    said: frozenset[str] = frozenset()  # rules that had something to say


@contextmanager
def without(rule: SchedulingRule) -> Iterator[set[str]]:
    """Let a rule say nothing; yield the rules that were heard, none."""
    owner, attribute, off = rule
    with patch.object(owner, attribute, off(getattr(owner, attribute))):
        yield set()


@contextmanager
def heard(rules: Sequence[str]) -> Iterator[set[str]]:
    """Let all rules hold, and note those that have something to say."""
    said = set[str]()

    def listening(name: str, real: Function, off: Function) -> Function:
        def listen(*args: Any) -> Any:
            found = real(*args)
            if name not in said and found != off(*args):
                said.add(name)
            return found

        return listen

    with ExitStack() as stack:
        for name in rules:
            owner, attribute, off = RULES[name]
            real = getattr(owner, attribute)
            stack.enter_context(patch.object(owner, attribute, listening(name, real, off(real))))
        yield said


def outcome(rules: Sequence[str], trial: SimulationTrial, left_out: str | None) -> RuleOutcome:
    with without(RULES[left_out]) if left_out else heard(rules) as said:
        record = record_of(trial)
    return RuleOutcome(columns_of(record), frozenset(said))


def mixes(folder: Path) -> dict[str, dict[str, SimulationTrial]]:
    """Return for each mix its trial on each cluster."""
    chosen = {**loads(CHATS), "answers": NamedLoad(f"lengths:{ANSWERS.resolve()}", 1.5)}
    found: dict[str, dict[str, SimulationTrial]] = {}
    for name, load in chosen.items():
        load = replace(load, seconds=SECONDS // 3 if name == "short chats" else SECONDS)
        beside = {
            "documents": load.beside_documents(folder / f"{name} documents.yaml", DOCUMENTS),
            "lots": load.beside_documents(folder / f"{name} lots.yaml"),
        }
        for where, part in CLUSTERS.items():
            alone = load.trial(1.5 * part * load.capacity, where)
            found.setdefault(f"{name} alone", {})[where] = alone
            for how, of_capacity in (("documents", 0.7), ("lots", 1.0)):
                rate = of_capacity * part * load.capacity
                found.setdefault(f"{name} {how}", {})[where] = replace(alone, workload=beside[how], rate=rate)
    save_profile(folder / "cpu.json", MACHINES["zen4"])
    tight = {"name": "chats", "prompt": "32-256", "output": "16-96", "num_requests": 100_000}
    tight |= {"ttft_s": 0.3, "tbt_s": 0.06}
    documents = {**DOCUMENTS, "prompt": "512-1024", "output": "32-128"}
    for mix, rate, seconds in (("tight", 4.0, SECONDS), ("rare", 0.5, 3 * SECONDS)):
        path = save_load(folder / f"{mix}.yaml", seconds, {**tight, "rate": rate}, documents)
        for where in CLUSTERS:
            trial = SimulationTrial("aligned", path, where, 0, None, str(folder / "cpu.json"), gateway_ms=GATEWAY_MS)
            found.setdefault(mix, {})[where] = trial
    path = save_load(folder / "flood.yaml", 3 * SECONDS, GUESTS, {**tight, **FLOODED, "ttft_s": 1.0, "tbt_s": 0.1875})
    for where in CLUSTERS:
        on_gpu = replace(next(iter(chosen.values())).trial(1.0, where), workload=path, rate=None)
        found.setdefault("flood", {})[where] = on_gpu
        found.setdefault("flood on a CPU", {})[where] = replace(found["tight"][where], workload=path)
    longer = {**DOCUMENTS, "prompt": "256-512", "output": "512-1024", "in_flight": 64}
    trace = folder / "choices.jsonl"
    trace.write_text("".join(_choices(SECONDS)), encoding="utf-8")
    streams: dict[str, tuple[int, list[dict[str, Any]]]] = {
        "scarce": (2 * SECONDS, [{**tight, "output": "64-256", "rate": 2.0}, longer]),
        "choices": (SECONDS, [{"name": "chats", "kind": "trace", "path": str(trace)}, DOCUMENTS]),
    }
    for mix, (seconds, each) in streams.items():
        path = save_load(folder / f"{mix}.yaml", seconds, *each)
        for where, trial in found["flood" if mix == "choices" else "tight"].items():
            found.setdefault(mix, {})[where] = replace(trial, workload=path)
    return found


def _choices(seconds: int) -> Iterator[str]:
    """Yield the lines of a trace with a prompt in each second, which is asked for several answers."""
    for at in range(seconds):
        row = {"timestamp": 1000 * at, "input_length": 1000, "output_length": 100, "hash_ids": [2 * at, 2 * at + 1]}
        yield from CHOICES * [json.dumps(row) + "\n"]


def weigh(mix: str, trials: Sequence[SimulationTrial], rules: Sequence[str]) -> Iterator[tuple[str, Shifts]]:
    """Run a mix with each seed, and without each rule that has something to say; tell and yield what rules bring."""
    held = of_each(partial(outcome, rules, left_out=None), trials)
    with_it = {trial.seed: each.columns for trial, each in zip(trials, held, strict=True)}
    for rule in rules:
        speaking = [trial for trial, each in zip(trials, held, strict=True) if rule in each.said]
        found = of_each(partial(outcome, (), left_out=rule), speaking)
        without_it = {trial.seed: each.columns for trial, each in zip(speaking, found, strict=True)}
        brings = shifts({**with_it, **without_it}, with_it)
        _tell(f"{rule}: {mix}, {trials[0].cluster}", brings, means(with_it.values()))
        yield rule, brings


def _tell(name: str, brings: Shifts, columns: Columns) -> None:
    line: dict[str, Any] = {"name": name, **columns, "brings": {}}
    for column, by_seed in brings.items():
        shift = Shift.from_values(by_seed)
        each = {"by_seed": [round(one, 2) for one in by_seed]} if columns else {"runs": len(by_seed)}
        line["brings"][column] = {
            "mean": round(shift.mean, 2),
            "error": round(shift.error, 2),
            "unit": LIMITS[column].unit,
            **each,
        }
    print(json.dumps(line), flush=True)


def main() -> None:
    with TemporaryDirectory() as folder:
        known = mixes(Path(folder))
        parser = command(__doc__)
        parser.add_argument("--rules", type=several(str, RULES), default=list(RULES), help="default: all")
        parser.add_argument("--mixes", type=several(str, known), default=list(known), help="default: all")
        parser.add_argument("--clusters", type=several(str, CLUSTERS), default=list(CLUSTERS), help="default: all")
        parser.add_argument("--seeds", type=several(int), default=list(SEEDS), help="default: 0 to 7")
        args = parser.parse_args()
        found = {rule: dict[str, Shifts]() for rule in args.rules}
        for mix in args.mixes:
            for cluster in args.clusters:
                trials = [replace(known[mix][cluster], seed=seed) for seed in args.seeds]
                for rule, brings in weigh(mix, trials, args.rules):
                    found[rule][f"{mix}, {cluster}"] = brings
    for rule, by_load in found.items():
        for kind in dict.fromkeys(map(kind_of, by_load)):
            _tell(f"{rule}: all {kind}", together(by_load[load] for load in by_load if kind_of(load) == kind), {})
        print(f"{rule}: {verdict(by_load, kind_of)}")


if __name__ == "__main__":
    main()
