"""Tests of the best-effort requests of a load test as the lines of a batch job."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from alignedserve.core import ServiceClass
from alignedserve.lab.bench.core import Dialect
from alignedserve.lab.bench.job import Look, endpoint_of, file_of, lines_of, records_of, together
from alignedserve.lab.bench.wording import IdWording, StreamWordings, WordWording
from alignedserve.lab.loads.workload.spec import read_workload
from tests.simulator.runs import record, rt

PAPERS = read_workload("sizes:service=be,prompt=9,output=4,arrivals=closed,in_flight=2,num_requests=5,jct_s=900")


def test_every_best_effort_request_is_a_line() -> None:
    lines = lines_of(PAPERS, 0)
    assert [arrival.request.id for arrival in lines] == [f"sizes-{number}" for number in range(5)]
    bodies = [json.loads(line) for line in file_of(lines, IdWording(Random(1)), Dialect("m")).splitlines()]
    assert [line["custom_id"] for line in bodies] == [arrival.request.id for arrival in lines]
    assert {line["url"] for line in bodies} == {"/v1/completions"}
    assert bodies[0]["body"].keys() == {"model", "prompt", "max_tokens", "temperature", "ignore_eos"}
    assert endpoint_of(lines, WordWording(Random(1))) == "/v1/chat/completions"


def test_real_time_streams_have_no_lines() -> None:
    assert {arrival.request.service for arrival in lines_of(read_workload("coserve"), 0)} == {ServiceClass.BE}


def test_lines_count_when_a_look_finds_them_done() -> None:
    lines = lines_of(PAPERS, 0)
    found = records_of(lines, "batch", [Look(1.0), Look(2.0, 2, 0, 9), Look(3.0, 3, 1, 13)])
    assert [(line.ended_at, len(line.token_at), line.outcome.value) for line in found] == [
        (2.0, 4, "finished"),
        (2.0, 5, "finished"),
        (3.0, 4, "finished"),
        (3.0, 0, "broken"),
    ]
    assert {line.job for line in found} == {"batch"}
    whole = together(record([rt("chat", 0.0, 0.5)]), found, ["a note"])
    assert (len(whole.requests), whole.duration_s, whole.notes) == (5, 3.0, ("a note",))


def test_a_file_of_chats_is_asked_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    asked = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    path.write_text(json.dumps({"messages": [*asked, {"role": "assistant", "content": "yes"}]}))
    workload = read_workload(f"chats:{path},service=be,num_requests=2,max_tokens=77")
    wording = StreamWordings(workload, IdWording(Random(1)))
    lines = lines_of(workload, 0)
    bodies = [json.loads(line)["body"] for line in file_of(lines, wording, Dialect("m")).splitlines()]
    assert [body["messages"] for body in bodies] == [asked, asked]
    assert {(body["max_tokens"], body["ignore_eos"]) for body in bodies} == {(77, False)}
    assert endpoint_of(lines, wording) == "/v1/chat/completions"
