"""Save the whole record of a run as a JSON file, so that it can be read again without another simulation."""

from __future__ import annotations

import json
from dataclasses import astuple
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any

from alignedserve.core import Role, ServiceClass, Slo, Usage
from alignedserve.cost.model import Shape
from alignedserve.errors import SimulateError, file_errors
from alignedserve.lab.loads.records.records import CopyRecord, RequestOutcome, RequestRecord, RunRecord, StepRecord

_FORMAT = 2


def save(record: RunRecord, path: Path) -> None:
    with file_errors(SimulateError, path):
        path.write_text(dump(record), encoding="utf-8")


def load(path: Path) -> RunRecord:
    try:
        with file_errors(SimulateError, path, "read"):
            return parse(path.read_text(encoding="utf-8"))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise SimulateError(f"{path} is not the record of a run ({type(error).__name__}: {error})") from None


def dump(record: RunRecord) -> str:
    return json.dumps(tree_of(record), allow_nan=False) + "\n"


def tree_of(record: RunRecord) -> dict[str, Any]:
    """Return the record as plain values."""
    return {
        "format": _FORMAT,
        "began_at": record.began_at,
        "ended_at": record.ended_at,
        "wall_s": record.wall_s,
        "workers": record.workers,
        "problems": record.problems,
        "notes": record.notes,
        "requests": [_plain_request(request) for request in record.requests],
        "steps": [_plain_step(step) for step in record.steps],
        "copies": [astuple(copy) for copy in record.copies],
        "received": [astuple(copy) for copy in record.received],
        "pool": [astuple(usage) for usage in record.pool],
    }


def _plain_request(request: RequestRecord) -> tuple[Any, ...]:
    slo = [_number(limit_s) for limit_s in astuple(request.slo)]
    return (
        *(request.id, request.service, slo, request.arrival_at, request.num_prompt, list(request.token_at)),
        *(request.outcome.value, request.ended_at, request.num_preempted, request.job),
        request.refused,
    )


def _plain_step(step: StepRecord) -> tuple[Any, ...]:
    return (
        *(step.worker, step.began_at, step.seconds, _number(step.predicted_s), tuple(step.shape), step.shortest),
        *(step.budget, _number(step.free_share), step.emitted),
    )


def _number(value: float) -> float | None:
    return value if isfinite(value) else None


def parse(text: str) -> RunRecord:
    return record_of(json.loads(text))


def record_of(tree: Any) -> RunRecord:
    """Return the record that these plain values are."""
    if not isinstance(tree, dict) or tree.get("format") != _FORMAT:
        raise ValueError(f"format {_FORMAT} is needed")
    return RunRecord(
        began_at=tree["began_at"],
        ended_at=tree["ended_at"],
        wall_s=tree["wall_s"],
        workers={name: Role(role) for name, role in tree["workers"].items()},
        requests=[_request(row) for row in tree["requests"]],
        steps=[_step(row) for row in tree["steps"]],
        copies=[CopyRecord(*row) for row in tree["copies"]],
        received=[CopyRecord(*row) for row in tree.get("received", ())],
        pool=[Usage(*row) for row in tree.get("pool", ())],
        problems=tuple(tree["problems"]),
        notes=tuple(tree["notes"]),
    )


def _request(row: list[Any]) -> RequestRecord:
    name, service, slo, arrival_at, num_prompt, token_at, outcome, *rest = row
    ttft_s, tbt_s, jct_s, *is_strict = slo
    promised = Slo(_or_inf(ttft_s), _or_inf(tbt_s), _or_inf(jct_s), *is_strict)
    return RequestRecord(
        name, ServiceClass(service), promised, arrival_at, num_prompt, tuple(token_at), RequestOutcome(outcome), *rest
    )


def _step(row: list[Any]) -> StepRecord:
    worker, began_at, seconds, predicted_s, shape, shortest, budget, free_share, emitted = row
    return StepRecord(
        *(worker, began_at, seconds, _or_nan(predicted_s), Shape(*shape), shortest, budget),
        *(_or_nan(free_share), tuple(emitted)),
    )


def _or_inf(value: float | None) -> float:
    return inf if value is None else value


def _or_nan(value: float | None) -> float:
    return nan if value is None else value
