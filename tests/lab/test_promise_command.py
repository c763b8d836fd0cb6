"""The command `alignedserve promise`: a table of what people get who ask at once, before anything is served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alignedserve.cli import main as cli
from alignedserve.core import WorkerLimits
from alignedserve.cost.model import Coefficients, Uncertainty
from alignedserve.lab.benchmarks.common.machines import Machine, save_profile
from alignedserve.lab.cli import promise

LIMITS = WorkerLimits(num_blocks=400, block_size=16, page_size=64, max_step_tokens=512, max_batch=16)
SLOW = Machine(Coefficients(fixed=0.1, token=(6e-3,), decode=1e-3, prefix=2e-6), LIMITS, Uncertainty(0.0, 0.1))


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate few cells, here: processes take longer to start."""
    monkeypatch.setattr(promise, "_PEOPLE", (1, 6))
    monkeypatch.setattr(promise, "_PROMPTS", (100, 500, 8000))
    monkeypatch.setattr(promise, "one_for_each_core", lambda: 1)


@pytest.fixture
def device(tmp_path: Path) -> str:
    save_profile(path := tmp_path / "slow.json", SLOW)
    return str(path)


def test_first_tokens_gaps_and_documents_of_a_device(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["promise", "--device", device, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["promise"]["ttft_ms"] > 5000
    cells = {(cell["people"], cell["prompt"]): cell for cell in told["cells"]}
    assert {prompt for _, prompt in cells} == {100, 500}, "8,000 tokens fit nobody's memory"
    alone = cells[1, 500]
    assert alone["first_token_s"] == pytest.approx(0.1 + 500 * 6e-3, rel=0.1)
    assert alone["gap_s"] == pytest.approx(0.11, rel=0.1)
    six = cells[6, 500]
    assert 6 * 3.0 < six["first_token_s"] < 30, "nobody is refused, whatever the wait"
    assert alone["gap_s"] < six["gap_s"] < told["promise"]["tbt_ms"] / 1e3
    assert 0 < six["documents_tokens_s"] < alone["documents_tokens_s"]
    assert cells[1, 100]["first_token_s"] < alone["first_token_s"]


def test_the_table_leaves_out_what_nobody_waits_for(
    device: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promise, "_MOST_S", 10.0)
    assert cli.main(["promise", "--device", device]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("promise: first token in 1")
    rows = {line.strip(): line.split()[-2:] for line in lines if "prompts of 500 tokens" in line}
    assert [row[-1] for row in rows.values()] == ["-"] * 3
    assert not any(row[0] == "-" for row in rows.values())


def test_a_device_that_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["promise", "--device", "h1000"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("alignedserve: --device 'h1000' is neither a file")


def test_this_machine_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["promise", "demo", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["machine"].startswith("demo on ")
    assert all(0 < cell["first_token_s"] < 60 for cell in told["cells"])
