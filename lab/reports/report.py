"""Write runs as text for people, as JSON for programs, and as CSV of requests, steps and runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, fields
from typing import Any

from alignedserve.lab.loads.figures.tables import REQUEST_TITLES, Unit, csv_text, request_row, table
from alignedserve.lab.loads.records.records import RunRecord, StepRecord
from alignedserve.lab.reports.comparison import (
    compare,
    comparison_table,
    comparison_tree,
    sweep_table,
    sweep_tree,
    sweeps,
)
from alignedserve.lab.reports.figure_rows import NUMBERS, ROWS, SECTIONS
from alignedserve.lab.reports.figures import RunFigures, figure_tree
from alignedserve.lab.reports.trial import SimulationTrial, TrialRun, by_rate

_FORMAT = 1
_LABEL_WIDTH = max(len(row.label) for row in ROWS)


# --- Text


def summary(run: TrialRun) -> str:
    """Return the summary of a run, without figures that have no data."""
    parts = [run.trial.title, *(text for title in SECTIONS if (text := _section(title, run.figures)))]
    return "\n\n".join([*parts, _workers(run.figures), *_notes([run])]) + "\n"


def _notes(runs: Sequence[TrialRun]) -> list[str]:
    """Return every note once, in the order of the runs."""
    lines = dict.fromkeys(f"  {note}" for run in runs for note in run.notes)
    return ["\n".join(["Notes", *lines])] if lines else []


def _section(title: str, figures: RunFigures) -> str:
    shown = [(row.label, row.show(figures)) for row in SECTIONS[title]]
    lines = [f"  {label:{_LABEL_WIDTH}}  {text}" for label, text in shown if text.split()[:2] not in _NOTHING]
    return "\n".join([title, *lines]) if lines else ""


_NOTHING = (["-"], ["mean", "-"])


def _workers(figures: RunFigures) -> str:
    titles = ["Workers", "steps", "busy", "copying", "waits for KV"]
    rows = [
        [
            *(worker.name, f"{worker.steps:,}"),
            *map(Unit.SHARE.show, (worker.step_share, worker.copy_share, worker.kv_wait_share)),
        ]
        for worker in figures.workers
    ]
    return table([titles, *rows])


def comparison_text(runs: Sequence[TrialRun]) -> str:
    """Return a table for each rate, and with several rates also the highest rate that each preset attains."""
    parts = [_comparison_text(rate, at_rate) for rate, at_rate in by_rate(runs)]
    parts[0] = f"{runs[0].trial.setting}\n{parts[0]}"
    if len(parts) > 1:
        parts.append(table(sweep_table(sweeps(runs))))
    return "\n\n".join([*parts, *_notes(runs)]) + "\n"


def _comparison_text(rate: float | None, runs: Sequence[TrialRun]) -> str:
    comparison = compare(runs)
    seeds = ", ".join(map(str, comparison.seeds))
    over = f"seeds {seeds}: mean ± half the range" if len(comparison.seeds) > 1 else f"seed {seeds}"
    at = "" if rate is None else f"{rate:g}/s, "
    best = "; * is the best mean" if len(comparison.presets) > 1 else ""
    return f"{at}{over}{best}\n\n{table(comparison_table(comparison))}"


# --- JSON


def document(runs: Sequence[TrialRun]) -> str:
    """Return all figures as JSON in a fixed order: only `speed` differs between two runs of the same trial."""
    tree: dict[str, Any] = {"format": _FORMAT, "runs": [_run_tree(run) for run in runs]}
    if len(runs) > 1:
        rates = list(by_rate(runs))
        tree["comparisons"] = [{"rate": rate, **comparison_tree(compare(at_rate))} for rate, at_rate in rates]
        if len(rates) > 1:
            tree["sweeps"] = sweep_tree(sweeps(runs))
    return json.dumps(tree, indent=1, allow_nan=False) + "\n"


def _run_tree(run: TrialRun) -> dict[str, Any]:
    said = {"problems": list(run.problems), "notes": list(run.notes)}
    return {"trial": asdict(run.trial), **said, "figures": figure_tree(run.figures)}


# --- CSV: times in seconds since the run began; a cell without a number is empty


def requests_csv(record: RunRecord) -> str:
    return csv_text(REQUEST_TITLES, (request_row(request, record.began_at) for request in record.requests))


def steps_csv(record: RunRecord) -> str:
    return csv_text(STEP_TITLES, (step_row(step, record.began_at) for step in record.steps))


STEP_TITLES = (
    "worker", "kind", "began_s", "seconds", "predicted_s", "chunks", "chunk_tokens", "cached", "decodes", "prefixes",
    "shortest", "longest", "hidden", "budget", "free_share", "emitted",
)  # fmt: skip


def step_row(step: StepRecord, began_at: float) -> Iterator[Any]:
    shape = step.shape
    yield from (step.worker, shape.kind.value, step.began_at - began_at, step.seconds, step.predicted_s)
    yield from (shape.chunks, shape.chunk_tokens, shape.cached, shape.decodes, shape.prefixes)
    yield from (step.shortest, shape.longest, shape.remade, step.budget, step.free_share, len(step.emitted))


def runs_csv(runs: Iterable[TrialRun]) -> str:
    """Return a row for each run, with every figure of its summary."""
    return csv_text(RUN_TITLES, map(run_row, runs))


RUN_TITLES = (*(field.name for field in fields(SimulationTrial)), *(row.path for row in NUMBERS))


def run_row(run: TrialRun) -> Iterator[Any]:
    yield from astuple(run.trial)
    yield from (run.figures.at(row.path) for row in NUMBERS)
