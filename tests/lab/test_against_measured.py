"""`lab.benchmarks.simulator --measured` reads the times of a real run from both kinds of files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alignedserve.lab.benchmarks.simulator import main

GPU = "rtx4090-llama-3.1-8b-tp1"
APART_S = 5000.0  # the engine's clock is ahead of the clients'
# arrival, prompt and output tokens, queued after, first token after, last token after
SERVED = ((0.0, 100, 11, 0.01, 0.1, 0.6), (0.5, 300, 21, 0.0, 0.2, 1.4), (1.5, 50, 1, 0.02, 0.3, 0.3))
MEANS = {"TTFT": 0.2, "TPOT": (0.05 + 0.06) / 2, "end to end": 2.3 / 3}


def csv_of(path: Path) -> Path:
    rows = [f"{at},{prompt},{output},{first},{last}" for at, prompt, output, _, first, last in SERVED]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens,ttft_s,e2e_s", *rows]), encoding="utf-8")
    return path


def jsonl_of(path: Path) -> Path:
    """Write the run as LLMServingSim does: not in the order of arrivals, which begin at any time."""
    rows = [
        {
            "arrival_time": 70.0 + at,
            "input_toks": prompt,
            "output_toks": output,
            "queued_ts": 70.0 + at + APART_S + queued,
            "first_token_ts": 70.0 + at + APART_S + first,
            "last_token_ts": 70.0 + at + APART_S + last,
        }
        for at, prompt, output, queued, first, last in reversed(SERVED)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def compared(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    monkeypatch.setattr("sys.argv", ["lab.benchmarks.simulator", "--measured", str(file), "--profile", GPU])
    main()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_both_kinds_of_files_give_the_times_that_were_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = compared(csv_of(tmp_path / "run.csv"), monkeypatch, capsys)
    assert rows == compared(jsonl_of(tmp_path / "run.jsonl"), monkeypatch, capsys)
    means = {row["name"]: row for row in rows}
    for name, mean in MEANS.items():
        assert means[f"{GPU}, {name}: mean"]["baseline"] == pytest.approx(mean, rel=1e-3)
        assert means[f"{GPU}, {name}: mean"]["value"] > 0
