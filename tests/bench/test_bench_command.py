"""Tests of `alignedserve bench` with a scripted server: what it prints and writes, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from alignedserve.cli import main as cli
from alignedserve.lab.bench.disclosures import NINE
from alignedserve.lab.loads.workload.spec import NAMED
from tests.bench.stub import Script, served

ROOT = Path(__file__).resolve().parents[2]
LOAD = "sizes:prompt=20,output=4,arrivals=at_once,num_requests=6"
BUSY = 429, {"error": {"message": "too many requests", "type": "rate_limit_error"}}


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def url(script: Script) -> Iterator[str]:
    with served(script) as url:
        yield url


def bench(capsys: pytest.CaptureFixture[str], *flags: str, workload: str = LOAD) -> tuple[int, str, str]:
    status = cli.main(["bench", "--workload", workload, "--warm-up", "0", *flags])
    return (status, *capsys.readouterr())


def rows(shown: str) -> dict[str, list[str]]:
    """Return the rows of the table: label -> cells."""
    found = (re.split(r" {2,}", line.strip()) for line in shown.splitlines())
    return {row[0]: row[1:] for row in found if len(row) > 1}


def test_a_load_is_measured(url: str, script: Script, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    status, shown, err = bench(capsys, "--url", url, "--json", str(out))
    assert (status, err) == (0, f"{url}/v1: 6 requests\n")
    assert shown.startswith(f"m at {url}/v1: {LOAD}, seed 0: ")
    found = rows(shown)
    assert (found["requests"], found["finished"], found["attainment"]) == (["6"], ["6"], ["100 %"])
    assert {"TTFT mean", "TTFT p50", "TPOT p95", "gap p99", "end to end p99"} <= found.keys()
    (run,) = json.loads(out.read_text())["runs"]
    assert run["classes"]["rt"]["requests.finished"] == 6
    assert run["classes"]["rt"]["ttft_s.p95"] > 0
    asked = script.bodies[-6:]
    assert {len(body["prompt"]) for body in asked} == {20}
    assert {body["model"] for body in asked} == {"m"}


def test_both_classes_stand_beside_each_other(url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    load = tmp_path / "load.yaml"
    load.write_text(
        "streams:\n"
        "  - {name: chat, prompt: 9, output: 3, arrivals: at_once, num_requests: 3, ttft_s: 60, tbt_s: 60}\n"
        "  - {name: papers, service: be, prompt: 9, output: 2, arrivals: closed, in_flight: 2, num_requests: 5}\n"
    )
    status, shown, _ = bench(capsys, "--url", url, workload=str(load))
    assert status == 0
    assert re.search(r"^ +RT +BE$", shown, re.MULTILINE)
    assert rows(shown)["finished"] == ["3", "5"]
    assert rows(shown)["tokens in time"] == ["100 %", "-"]


def test_words_are_asked_of_a_chat_route(url: str, script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    script.tells_ids = False
    status, shown, _ = bench(capsys, "--url", url, "--chat")
    assert status == 0
    assert all(len(body["messages"][0]["content"].split()) == 20 for body in script.bodies)
    assert "tokens of 6 answers were counted by usage" in shown
    script.tells_usage = False
    assert "tokens of 6 answers were counted by pieces of text" in bench(capsys, "--url", url, "--chat")[1]


def test_servers_are_asked_the_same_in_turns(url: str, script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    other = Script()
    with served(other) as second:
        status, shown, _ = bench(capsys, "--url", url, "--compare", second, "--rounds", "2")
    assert status == 0
    assert re.search(r"^ +A RT +B RT$", shown, re.MULTILINE)
    assert rows(shown)["finished"] == ["12", "12"]
    lengths = [sorted(body["max_tokens"] for body in each.bodies) for each in (script, other)]
    assert lengths[0] == lengths[1]


def test_refusals_are_counted_and_said(url: str, script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    script.refuse = lambda number, _: BUSY if number % 2 == 0 else None
    status, shown, _ = bench(capsys, "--url", url)
    assert status == 0
    assert (rows(shown)["refused"], rows(shown)["attainment"]) == (["3"], ["50 %"])
    assert "429 rate_limit_error (3 times): too many requests" in shown


def test_broken_answers_are_counted_and_said(url: str, script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    script.breaks_from = 2
    _, shown, _ = bench(capsys, "--url", url)
    assert (rows(shown)["broken"], rows(shown)["attainment"]) == (["6"], ["0 %"])
    assert "the answer broke off (6 times): the server closed the connection" in shown


def test_fields_that_a_server_refuses_are_left_out(
    url: str, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    def strict(_: int, body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        unknown = [name for name in ("ignore_eos", "slo", "return_token_ids") if name in body]
        return (400, {"error": {"message": f"Unknown parameter: '{unknown[0]}'."}}) if unknown else None

    script.refuse = strict
    status, shown, _ = bench(capsys, "--url", url)
    assert (status, rows(shown)["finished"]) == (0, ["6"])
    assert "the server refuses slo: it was not told what is promised" in shown
    assert "service_tier" not in shown


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        ((404, {"error": {"message": "the model 'x' is not served here"}}), "refuses with 404: the model 'x' is not"),
        ((401, {"error": {"message": "wrong key"}}), "refuses with 401: wrong key"),
        ((400, {"error": {"message": "prompts are text"}}), "refuses with 400: prompts are text"),
    ],
)
def test_a_server_that_refuses_the_first_request_is_not_measured(
    url: str, script: Script, capsys: pytest.CaptureFixture[str], refusal: tuple[int, dict[str, Any]], said: str
) -> None:
    script.refuse = lambda _number, _body: refusal
    status, shown, err = bench(capsys, "--url", url, "--model", "x")
    assert (status, shown) == (2, "")
    assert f"{url}/v1 {said}" in err
    assert err.count("\n") == 1


def test_a_wrong_key_a_wrong_address_and_no_model(url: str, script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    script.key = "right"
    assert bench(capsys, "--url", url, "--api-key", "wrong")[2].endswith("refuses with 401: wrong key\n")
    assert bench(capsys, "--url", url, "--api-key", "right")[0] == 0
    assert (
        "lists no model (404): name one with --model"
        in bench(capsys, "--url", f"{url}/elsewhere", "--api-key", "right")[2]
    )
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
        assert f"no server answers at {nobody}/v1" in bench(capsys, "--url", nobody)[2]
    assert "is no address of a server" in bench(capsys, "--url", "localhost:8000")[2]


def test_a_wrong_workload(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(capsys, workload="chta")[2].startswith("alignedserve: --workload: 'chta' is none of these")
    assert "bench has one key" in bench(capsys, workload="chat,caller=ann")[2]


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_what_was_measured_so_far_is_printed_at_a_signal(url: str, script: Script, signal_number: int) -> None:
    """The server holds the second lot back; the command is interrupted, as by a terminal, once that waits."""
    script.holds_from = 4
    load = "sizes:prompt=9,output=2,arrivals=closed,in_flight=2,num_requests=9"
    command = [sys.executable, "-m", "alignedserve", "bench", "--url", url, "--workload", load, "--warm-up", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    ) as process:
        assert script.waits.wait(60)
        process.send_signal(signal_number)
        shown, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, f"{url}/v1: 9 requests\n")
    assert rows(shown)["finished"] == ["2"]
    assert "interrupted: 2 requests that were open are left out" in shown


def test_files_are_written_and_shown_again(url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = {name: tmp_path / f"run.{name}" for name in ("json", "csv", "html")}
    _, shown, _ = bench(
        capsys, "--url", url, "--json", str(files["json"]), "--csv", str(files["csv"]), "--page", str(files["html"])
    )
    assert len(files["csv"].read_text().splitlines()) == 7
    assert "<svg" in files["html"].read_text()
    assert cli.main(["bench", "--from", str(files["json"])]) == 0
    assert capsys.readouterr().out == shown
    both = tmp_path / "both.html"
    assert cli.main(["bench", "--from", str(files["json"]), str(files["json"]), "--page", str(both)]) == 0
    assert ">B RT<" in both.read_text()


def test_what_measures_nothing_takes_no_load(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    assert cli.main(["bench", "--from", str(tmp_path / "run.json"), "--seed", "1"]) == 2
    assert "--from measures nothing, so --seed has no effect beside it" in capsys.readouterr().err
    assert cli.main(["bench", "--from", str(tmp_path / "run.json")]) == 2
    assert "was not written by bench --json" in capsys.readouterr().err
    assert bench(capsys, "--batch")[2].endswith("no stream of this workload is best-effort (service=be)\n")


def test_a_load_of_the_public_suite_asks_for_no_promise(
    url: str, script: Script, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out, load = tmp_path / "run.json", "cpu-rag,length_scale=0.01,in_flight=2,num_requests=3"
    told = ("--disclose", "precision=bfloat16", "quantization=Q4_K_M", "--json", str(out))
    status, shown, _ = bench(capsys, "--url", url, *told, workload=load)
    assert status == 0
    assert {(len(body["prompt"]), body["max_tokens"]) for body in script.bodies} == {(77, 5)}
    assert not any("slo" in body for body in script.bodies)
    disclosed = shown.partition("Disclosures\n")[2].strip().splitlines()
    assert [line.strip().partition(":")[0] for line in disclosed] == list(NINE)
    assert {"precision: bfloat16", "quantization: Q4_K_M", "load: closed loop"} <= {*map(str.strip, disclosed)}
    assert "2 in flight" in shown
    (run,) = json.loads(out.read_text())["runs"]
    assert run["disclosures"]["clock"].startswith("one: the client's monotonic clock")
    assert cli.main(["bench", "--from", str(out)]) == 0
    assert "Disclosures" in capsys.readouterr().out


def test_a_fact_that_nobody_discloses_is_named(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = bench(capsys, "--url", url, "--disclose", "dtype=bfloat16")
    assert (status, "--disclose dtype: write NAME=TEXT with one of boundary" in err) == (2, True), err


@pytest.mark.parametrize("name", [name for name in NAMED if name.startswith("cpu-")])
def test_each_load_of_the_public_suite_runs(name: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    few = {"cpu-mixed": "first_s=0.5,rate=10", "cpu-offline": "num_requests=2"}.get(name, "in_flight=2,num_requests=2")
    status, shown, _ = bench(capsys, "--url", url, workload=f"{name},length_scale=0.01,{few}")
    assert status == 0
    assert ("BE" in shown) is (name in ("cpu-mixed", "cpu-offline"))
