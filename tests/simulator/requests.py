"""Requests for cores that run without a deployment, and the lengths of real conversations."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from alignedserve.core import Request, Sampling, ServiceClass, Slo

LENGTHS = Path(__file__).resolve().parents[1] / "simulator" / "data" / "sharegpt300.csv"


def request(id: str, prompt: Iterable[int], max_tokens: int, **more: Any) -> Request:
    """Return a chat's first attempt, greedy and without promises where `more` says nothing else."""
    usual: dict[str, Any] = {
        "is_metered": True,
        "owner": "gateway-0",
        "attempt": 0,
        "emitted": (),
        "sampling": Sampling(),
    }
    usual |= {"stop_tokens": (), "service": ServiceClass.RT, "slo": Slo(), "arrival_at": 0.0}
    return Request(id=id, prompt=tuple(prompt), max_tokens=max_tokens, **(usual | more))


def lengths(path: Path) -> list[tuple[int, int]]:
    """Return the lengths of prompts and outputs in a CSV file with prompt_tokens and output_tokens."""
    with path.open(encoding="utf-8") as file:
        return [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)]
