"""Write deploy/grafana/board.json, the Grafana board of a deployment, from the list of its panels.

    python tools/grafana_board.py

tests/metrics/test_board.py holds the file to this list, and the list to the metrics that exist.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BOARD = ROOT / "deploy" / "grafana" / "board.json"

_SOURCE = {"type": "prometheus", "uid": "prometheus"}  # as deploy/grafana/source.yaml calls it
_WIDTH, _HEIGHT = 24, 8  # of the board, and of a panel
PREFIX = "${prefix}"  # of the metrics: the board asks which, since --metrics-prefix may be another
_PREFIXES = {
    "name": "prefix",
    "label": "metrics of",
    "type": "custom",
    "query": "alignedserve,vllm",
    "current": {"text": "alignedserve", "value": "alignedserve"},
    "options": [{"text": name, "value": name, "selected": name == "alignedserve"} for name in ("alignedserve", "vllm")],
}


class Line(NamedTuple):
    """A query, with the name of its lines in terms of labels."""

    query: str
    name: str


class Panel(NamedTuple):
    title: str
    unit: str  # as Grafana names it
    lines: tuple[Line, ...]
    about: str = ""


def _quantiles(metric: str, by: str) -> tuple[Line, ...]:
    return tuple(
        Line(
            f"histogram_quantile({share}, sum by (le, {by}) (rate(alignedserve:{metric}_bucket[$__rate_interval])))",
            f"{{{{{by}}}}} p{100 * share:.0f}",
        )
        for share in (0.5, 0.99)
    )


def _mean(metric: str, by: str) -> Line:
    rates = [f"sum by ({by}) (rate(alignedserve:{metric}_{end}[$__rate_interval]))" for end in ("sum", "count")]
    return Line(" / ".join(rates), f"{{{{{by}}}}}")


def _rate(metric: str, *by: str) -> Line:
    return Line(
        f"sum by ({', '.join(by)}) (rate(alignedserve:{metric}[$__rate_interval]))",
        " ".join(f"{{{{{label}}}}}" for label in by),
    )


def _sum(metric: str, *by: str) -> Line:
    return Line(f"sum by ({', '.join(by)}) (alignedserve:{metric})", " ".join(f"{{{{{label}}}}}" for label in by))


BOARD_ROWS: dict[str, tuple[Panel, ...]] = {
    "Promises": (
        Panel(
            "Requests that kept their promise",
            "percentunit",
            (Line('alignedserve:slo_attainment{kind="all"}', "{{class}} {{tier}} {{part}}"),),
            "Share of the last 15 minutes.",
        ),
        Panel("Time to first token", "s", _quantiles("time_to_first_token_seconds", "class")),
        Panel("Time between tokens", "s", _quantiles("inter_token_latency_seconds", "class")),
    ),
    "Load": (
        Panel("Requests that ended", "reqps", (_rate("request_success_total", "class", "finished_reason"),)),
        Panel("Requests refused", "reqps", (_rate("admission_rejections_total", "class", "reason"),)),
        Panel("Open requests", "short", (_sum("num_requests_at", "class", "stage"),), "Where they are."),
        Panel(
            "Tokens",
            "short",
            (
                _rate("generation_tokens_total", "class")._replace(name="{{class}} output"),
                _rate("prompt_tokens_total", "class")._replace(name="{{class}} prompt"),
            ),
            "Tokens a second.",
        ),
        Panel("Time until a prompt runs", "s", _quantiles("request_queue_time_seconds", "class")),
        Panel(
            "Prompt tokens found in caches",
            "percentunit",
            (
                Line(
                    "sum by (class) (rate(alignedserve:prefix_cache_hits_total[$__rate_interval]))"
                    " / sum by (class) (rate(alignedserve:prefix_cache_queries_total[$__rate_interval]))",
                    "{{class}}",
                ),
            ),
        ),
    ),
    "Workers": (
        Panel("Requests in steps", "short", (_sum("num_requests_running", "worker", "class"),)),
        Panel("Requests that wait on a worker", "short", (_sum("num_requests_waiting", "worker", "class"),)),
        Panel("KV cache in use", "percentunit", (_sum("kv_cache_usage_perc", "worker"),)),
        Panel("Time of a step", "s", _quantiles("iteration_time_seconds", "worker")),
        Panel("Tokens of a step", "short", (_mean("iteration_tokens_total", "worker"),), "On average."),
        Panel(
            "Slack of the most urgent request",
            "s",
            (Line("min by (worker) (alignedserve:slack_seconds)", "{{worker}}"),),
            "Below 0 it is late.",
        ),
        Panel("Requests that were placed again", "reqps", (_rate("request_replacements_total", "class", "reason"),)),
        Panel("Requests that had to leave", "reqps", (_rate("num_preemptions_total", "class", "cause", "kv"),)),
        Panel("BE tokens held back for RT", "short", (_rate("be_tokens_held_back_total", "worker"),), "A second."),
        Panel(
            "What came over what was predicted",
            "short",
            (
                _mean("iteration_time_ratio", "worker")._replace(name="{{worker}} time of a step"),
                _mean("generation_tokens_ratio", "worker")._replace(name="{{worker}} length of an output"),
            ),
            "1: as predicted.",
        ),
    ),
    "Alignment and the pool": (
        Panel("Spread of lengths in a step", "short", (_mean("decode_step_spread_tokens", "worker"),), "In tokens."),
        Panel("Decode steps by their batches", "short", (_rate("decode_steps_total", "batches"),), "Steps a second."),
        Panel("Prefetches", "reqps", (_rate("kv_prefetches_total", "worker", "outcome"),)),
        Panel("Pages of the pool", "short", (_sum("kv_pool_pages", "pool", "state"),)),
        Panel("Pages compressed", "short", (_rate("kv_pages_compressed_total", "pool"),), "A second."),
        Panel(
            "Faults of KV",
            "short",
            (
                _rate("kv_copies_refused_total", "worker")._replace(name="{{worker}} copies refused"),
                _rate("kv_transfers_failed_total", "worker")._replace(name="{{worker}} transfers failed"),
            ),
            "A second.",
        ),
    ),
    "Batch jobs": (
        Panel("Open jobs", "short", (_sum("batch_jobs", "status"), Line("alignedserve:batch_jobs_late", "late"))),
        Panel("Lines without a result", "short", (_sum("batch_lines", "state"),)),
        Panel("Tries of lines", "reqps", (_rate("batch_line_tries_total", "outcome"),)),
    ),
    "Processes": (
        Panel("Processors in use", "short", (Line("rate(process_cpu_seconds_total[$__rate_interval])", "{{part}}"),)),
        Panel("Memory", "bytes", (Line("process_resident_memory_bytes", "{{part}}"),)),
        Panel("Open files", "short", (Line("process_open_fds", "{{part}}"),)),
    ),
}


def board() -> dict[str, Any]:
    """Return the board as Grafana reads it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in BOARD_ROWS.items():
        panels.append(_row(title, y, len(panels) + 1))
        y += 1
        for start in range(0, len(row), 3):
            for column, panel in enumerate(row[start : start + 3]):
                panels.append(_drawn(panel, _WIDTH // 3 * column, y, len(panels) + 1))
            y += _HEIGHT
    return {
        "uid": "alignedserve",
        "title": "AlignedServe",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_PREFIXES]},
        "panels": panels,
    }


def _row(title: str, y: int, number: int) -> dict[str, Any]:
    place = {"x": 0, "y": y, "w": _WIDTH, "h": 1}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _drawn(panel: Panel, x: int, y: int, number: int) -> dict[str, Any]:
    targets = [
        {
            "refId": "ABCDEF"[index],
            "datasource": _SOURCE,
            "expr": line.query.replace("alignedserve:", f"{PREFIX}:"),
            "legendFormat": line.name,
        }
        for index, line in enumerate(panel.lines)
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "gridPos": {"x": x, "y": y, "w": _WIDTH // 3, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": targets,
    }


if __name__ == "__main__":
    BOARD.write_text(json.dumps(board(), indent=1) + "\n", encoding="utf-8")
