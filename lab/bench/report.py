"""A load test as a table for people, as CSV, and as JSON from which all figures follow again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any, TypeAlias

from alignedserve.core import ServiceClass
from alignedserve.errors import AlignedServeError, file_errors
from alignedserve.lab.loads.figures.request_figures import (
    RequestFigures,
    attains,
    end_to_end_s,
    finished,
    gaps_s,
    has_stalled,
    keeps_all,
    keeps_jct,
    keeps_tbt,
    keeps_ttft,
    mean_tpot_s,
    promised_in_time,
    requests_of_class,
    ttft_s,
)
from alignedserve.lab.loads.figures.tables import REQUEST_TITLES, Unit, csv_text, request_row, table
from alignedserve.lab.loads.records import record_file
from alignedserve.lab.loads.records.distribution import Distribution, ratio, share
from alignedserve.lab.loads.records.records import RequestRecord, RunRecord

ClassFigures: TypeAlias = Mapping[str, float]  # of one class, by the paths of ROWS
_ENDS = ("count", "finished", "refused", "broken", "left")  # of requests
_PARTS = ("mean", "p50", "p95", "p99")  # of a distribution


def class_figures(requests: Sequence[RequestRecord], service: ServiceClass, duration_s: float) -> ClassFigures:
    """Return the figures of one class. Rates are over the whole test, from the first request to the end of the last."""
    is_kept = attains if service is ServiceClass.RT else keeps_jct
    timed = [promised_in_time(request) for request in requests if service is ServiceClass.RT]
    streamed = [request for request in requests if request.token_at and request.job is None]
    counted = RequestFigures.from_requests(requests)
    num_prompt = sum(request.num_prompt for request in requests if request.token_at)
    found = {
        **{f"requests.{name}": getattr(counted, name) for name in _ENDS},
        "attainment": share([is_kept(request) for request in requests]),
        "ttft_attainment": share([keeps_ttft(request) for request in requests]),
        "tbt_attainment": share([keeps_tbt(request) for request in requests]),  # of 99 of 100 gaps
        "stalled": share([has_stalled(request) for request in requests]),
        "goodput": ratio(sum(map(keeps_all, requests)), duration_s),
        "tokens_in_time": share([is_in_time for tokens in timed for is_in_time in tokens]),
        "tokens_per_s": ratio(counted.output_tokens, duration_s),  # that reached the client
        "prompt_tokens_per_s": ratio(num_prompt, duration_s),
    }
    distributions: dict[str, Iterable[float]] = {
        "ttft_s": map(ttft_s, streamed),
        "tpot_s": (mean_tpot_s(request) for request in streamed if len(request.token_at) > 1),
        "gap_s": (gap for request in streamed for gap in gaps_s(request)),  # of all requests together
        "end_to_end_s": map(end_to_end_s, finished(requests)),
    }
    for name, values in distributions.items():
        spread = Distribution.from_values(values)
        found |= {f"{name}.{part}": getattr(spread, part) for part in _PARTS}
    return found


@dataclass(frozen=True, slots=True)
class LoadFigures:
    duration_s: float
    tokens_per_s: float
    goodput: float
    classes: dict[ServiceClass, ClassFigures]  # those that had requests

    @classmethod
    def from_record(cls, record: RunRecord) -> LoadFigures:
        by_class = {service: requests_of_class(record.requests, service) for service in ServiceClass}
        classes = {
            service: class_figures(requests, service, record.duration_s)
            for service, requests in by_class.items()
            if requests
        }
        return cls(
            record.duration_s,
            sum(figures["tokens_per_s"] for figures in classes.values()),
            sum(figures["goodput"] for figures in classes.values()),
            classes,
        )


@dataclass(frozen=True, slots=True)
class Row:
    label: str
    path: str
    unit: Unit

    def show(self, figures: ClassFigures) -> str:
        return self.unit.show(figures[self.path])


_TIMES = {"TTFT": "ttft_s", "TPOT": "tpot_s", "gap": "gap_s"}

ROWS = (
    Row("requests", "requests.count", Unit.NUMBER),
    Row("finished", "requests.finished", Unit.NUMBER),
    Row("refused", "requests.refused", Unit.NUMBER),
    Row("broken", "requests.broken", Unit.NUMBER),
    Row("left", "requests.left", Unit.NUMBER),
    Row("attainment", "attainment", Unit.SHARE),
    Row("TTFT in time", "ttft_attainment", Unit.SHARE),
    Row("P99 gap in time", "tbt_attainment", Unit.SHARE),
    Row("stalled", "stalled", Unit.SHARE),
    Row("goodput", "goodput", Unit.PER_SECOND),
    Row("tokens in time", "tokens_in_time", Unit.SHARE),
    Row("output tokens", "tokens_per_s", Unit.PER_SECOND),
    Row("prompt tokens", "prompt_tokens_per_s", Unit.PER_SECOND),
    *(Row(f"{name} {part}", f"{path}.{part}", Unit.MILLISECONDS) for name, path in _TIMES.items() for part in _PARTS),
    *(Row(f"end to end {part}", f"end_to_end_s.{part}", Unit.SECONDS) for part in _PARTS),
)


_FORMAT = 1


@dataclass(frozen=True, slots=True)
class ErrorCount:
    """How often requests failed for one reason, and what was said the first time."""

    kind: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """The record of a load on one server."""

    url: str
    model: str
    workload: str
    seed: int
    record: RunRecord
    errors: tuple[ErrorCount, ...] = ()
    cached: float = float("nan")  # share of prompt tokens that the server did not compute; NaN if not told
    disclosed: Mapping[str, str] = field(default_factory=dict)  # where it was asked for

    @property
    def figures(self) -> LoadFigures:
        return LoadFigures.from_record(self.record)


def joined(records: Sequence[RunRecord]) -> RunRecord:
    """Return the records as one, each after the end of the one before."""
    requests, end_at = list[RequestRecord](), 0.0
    for record in records:
        requests += [_later(request, end_at - record.began_at) for request in record.requests]
        end_at += record.duration_s
    notes = dict.fromkeys(note for record in records for note in record.notes)
    return RunRecord(0.0, end_at, end_at, {}, requests, notes=tuple(notes))


def _later(request: RequestRecord, by_s: float) -> RequestRecord:
    token_at = [at + by_s for at in request.token_at]
    return replace(request, arrival_at=request.arrival_at + by_s, ended_at=request.ended_at + by_s, token_at=token_at)


# --- Text


def text(runs: Sequence[MeasuredRun]) -> str:
    """Return a table with a column for each class of each run."""
    parts = ["\n".join(heads(runs)), table(rows(runs))]
    parts += [*_block("Errors", error_lines(runs)), *_block("Notes", note_lines(runs))]
    parts += _block("Disclosures", disclosure_lines(runs))
    return "\n\n".join(parts) + "\n"


def _block(title: str, lines: Sequence[str]) -> list[str]:
    return ["\n".join([title, *(f"  {line}" for line in lines)])] if lines else []


def heads(runs: Sequence[MeasuredRun]) -> list[str]:
    """Return a line for each run: the server, what it was asked, and what it gave as a whole."""
    return [_head(label, run) for label, run in zip(labels(runs), runs, strict=True)]


def _head(label: str, run: MeasuredRun) -> str:
    figures = run.figures
    rates = f"{figures.tokens_per_s:,.0f} tokens/s, goodput {figures.goodput:.3g}/s"
    cached = f", {100 * run.cached:.0f} % of prompts from its cache" if run.cached > 0 else ""
    asked = f"{run.model} at {run.url}: {run.workload}, seed {run.seed}"
    return f"{label}{asked}: {figures.duration_s:.1f} s, {rates}{cached}"


def labels(runs: Sequence[MeasuredRun]) -> list[str]:
    """Return a letter for each run; nothing where there is one run."""
    return [f"{chr(ord('A') + number)}  " for number in range(len(runs))] if len(runs) > 1 else [""]


def rows(runs: Sequence[MeasuredRun]) -> list[list[str]]:
    """Return the table: a row for each figure that any run has, under a row of titles."""
    columns = [
        (f"{label.strip()} {service.value.upper()}".strip(), figures)
        for label, run in zip(labels(runs), runs, strict=True)
        for service, figures in run.figures.classes.items()
    ]
    cells = [[row.label, *(row.show(figures) for _, figures in columns)] for row in ROWS]
    return [["", *(title for title, _ in columns)], *(row for row in cells if set(row[1:]) != {"-"})]


def error_lines(runs: Sequence[MeasuredRun]) -> list[str]:
    return [
        f"{label}{error.kind} ({error.count:,} times): {error.example}"
        for label, run in zip(labels(runs), runs, strict=True)
        for error in run.errors
    ]


def note_lines(runs: Sequence[MeasuredRun]) -> list[str]:
    """Return every note once."""
    found = (f"{label}{note}" for label, run in zip(labels(runs), runs, strict=True) for note in run.record.notes)
    return list(dict.fromkeys(found))


def disclosure_lines(runs: Sequence[MeasuredRun]) -> list[str]:
    """Return every fact once: what was asked of one server was asked of all."""
    return list(dict.fromkeys(f"{name}: {fact}" for run in runs for name, fact in run.disclosed.items()))


# --- CSV


def requests_csv(runs: Sequence[MeasuredRun]) -> str:
    """Return a row for each request."""
    found = (
        (run.url, run.model, run.workload, run.seed, *request_row(request, run.record.began_at))
        for run in runs
        for request in run.record.requests
    )
    return csv_text(("url", "model", "workload", "seed", *REQUEST_TITLES), found)


# --- JSON


def document(runs: Sequence[MeasuredRun]) -> str:
    return json.dumps({"format": _FORMAT, "runs": list(map(_tree, runs))}, allow_nan=False) + "\n"


def _tree(run: MeasuredRun) -> dict[str, Any]:
    figures = run.figures
    return {
        "url": run.url,
        "model": run.model,
        "workload": run.workload,
        "seed": run.seed,
        "duration_s": figures.duration_s,
        "tokens_per_s": _known(figures.tokens_per_s),
        "goodput": _known(figures.goodput),
        "cached": _known(run.cached),
        "classes": {
            service.value: {row.path: _known(found[row.path]) for row in ROWS}
            for service, found in figures.classes.items()
        },
        "errors": [asdict(error) for error in run.errors],
        "disclosures": dict(run.disclosed),
        "record": record_file.tree_of(run.record),
    }


def _known(value: float) -> float | None:
    return value if isfinite(value) else None


def read(path: Path) -> list[MeasuredRun]:
    """Return the runs that a file of `--json` holds."""
    try:
        with file_errors(AlignedServeError, path, "read"):
            tree = json.loads(path.read_text(encoding="utf-8"))
            if tree["format"] != _FORMAT:
                raise AlignedServeError(f"{path} is of another version")
            return [_run(run) for run in tree["runs"]]
    except (KeyError, TypeError, ValueError) as error:
        raise AlignedServeError(f"{path} was not written by bench --json ({type(error).__name__}: {error})") from None


def _run(tree: Any) -> MeasuredRun:
    cached = float("nan") if tree["cached"] is None else tree["cached"]
    errors = tuple(ErrorCount(**error) for error in tree["errors"])
    record, disclosed = record_file.record_of(tree["record"]), tree.get("disclosures", {})
    return MeasuredRun(tree["url"], tree["model"], tree["workload"], tree["seed"], record, errors, cached, disclosed)
