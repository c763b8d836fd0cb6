"""Tests of `alignedserve bench` on a real deployment: lengths, turns and classes come through, and are counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alignedserve.cli import main as cli
from tests.demo_conversations import conversations
from tests.end_to_end.deployment import Deployment
from tests.rare import rare


def measured(deployment: Deployment, workload: str, folder: Path, *flags: str) -> Any:
    """Return the only run of a load, as JSON."""
    out = folder / "run.json"
    line = ["bench", "--url", deployment.url, "--workload", workload, "--json", str(out), "--warm-up", "1", *flags]
    assert cli.main(line) == 0
    (run,) = json.loads(out.read_text())["runs"]
    return run


def test_turns_of_chats_are_counted_to_the_token_and_found_in_the_cache(deployment: Deployment, tmp_path: Path) -> None:
    load = "sizes:prompt=200,output=12,turns=2,think_s=0.1,num_requests=3,rate=20,ttft_s=100,tbt_s=100"
    run = measured(deployment, load, tmp_path)
    chats = run["classes"]["rt"]
    assert (chats["requests.count"], chats["requests.finished"], chats["attainment"]) == (6, 6, 1.0)
    assert [len(request[5]) for request in run["record"]["requests"]] == [12] * 6
    assert sorted(request[4] for request in run["record"]["requests"]) == [200] * 3 + [412] * 3
    assert run["cached"] > 0.2
    assert not any("counted" in note for note in run["record"]["notes"]), "the ids count"


@rare  # the batch job below runs beside chats
def test_best_effort_requests_run_beside_chats(
    deployment: Deployment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = tmp_path / "load.json"
    chats = {"name": "chat", "prompt": 20, "output": 8, "rate": 20, "num_requests": 4}
    papers = {"name": "papers", "service": "be", "prompt": 60, "output": 10, "arrivals": "closed", "in_flight": 3}
    load.write_text(json.dumps({"streams": [chats, papers | {"num_requests": 6}]}))
    run = measured(deployment, str(load), tmp_path, "--chat")
    assert [run["classes"][name]["requests.finished"] for name in ("rt", "be")] == [4, 6]
    assert run["classes"]["be"]["attainment"] == 1.0
    assert [len(request[5]) for request in run["record"]["requests"] if request[0].startswith("papers")] == [10] * 6
    assert "RT" in capsys.readouterr().out


def test_a_model_that_is_not_served(deployment: Deployment, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--url", deployment.url, "--model", "other"]) == 2
    assert "refuses with 404: the model 'other' is not served here" in capsys.readouterr().err


@rare
def test_best_effort_requests_are_lines_of_a_batch_job(deployment: Deployment, tmp_path: Path) -> None:
    load = "sizes:service=be,prompt=60,output=10,arrivals=closed,in_flight=3,num_requests=6"
    papers = measured(deployment, load, tmp_path, "--batch")["classes"]["be"]
    assert (papers["requests.count"], papers["requests.finished"], papers["attainment"]) == (6, 6, 1.0)
    assert papers["tokens_per_s"] > 0
    assert papers["ttft_s.mean"] is None


def test_a_batch_job_beside_chats_is_cancelled_when_they_have_ended(deployment: Deployment, tmp_path: Path) -> None:
    load = tmp_path / "load.json"
    chats = {"name": "chat", "prompt": 20, "output": 8, "rate": 5, "num_requests": 6}
    papers = {"name": "papers", "service": "be", "prompt": 60, "output": 40, "num_requests": 1000}
    load.write_text(json.dumps({"streams": [chats, papers]}))
    run = measured(deployment, str(load), tmp_path, "--batch")
    assert run["classes"]["rt"]["requests.finished"] == 6
    assert any("of its 1,000 lines had not ended: left out" in note for note in run["record"]["notes"])


@rare  # tests/bench reads such files
def test_texts_of_a_file_end_where_the_model_ends_them(deployment: Deployment, tmp_path: Path) -> None:
    chats, asked = tmp_path / "chats.jsonl", [said.messages for said in conversations() if len(said.messages) == 1]
    chats.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in asked[:12]))
    load = f"chats:{chats},num_requests=6,arrivals=at_once,max_tokens=60"
    run = measured(deployment, load, tmp_path)
    lengths = [len(request[5]) for request in run["record"]["requests"]]
    assert run["classes"]["rt"]["requests.finished"] == 6
    assert max(lengths) <= 60
    assert len(set(lengths)) > 1, "the demo model's answers are of many lengths"
