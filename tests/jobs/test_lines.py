"""Tests of what the file of a batch may hold, and of the errors for anything else."""

from __future__ import annotations

import io
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.config.prices import Prices
from alignedserve.gateway.batches import batch_object
from alignedserve.jobs.lines import (
    MOST_PROBLEMS,
    LineRules,
    RawLine,
    Verdict,
    answered_line,
    check_file,
    custom_id_of,
    raw_lines,
    read_checked_line,
)
from alignedserve.store.job import Endpoint, Job, LineCounts

RULES = LineRules(Endpoint.CHAT, lambda model: model == "demo", most_lines=100, most_bytes=1_000)


def line(custom_id: Any = "a", **fields: Any) -> bytes:
    whole = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": {"model": "demo"}}
    return json.dumps(whole | fields).encode()


def checked(*lines: bytes, rules: LineRules = RULES) -> Verdict:
    return check_file(io.BytesIO(b"\n".join(lines)), rules)


def test_a_valid_file() -> None:
    assert checked(line("a"), line("b")) == (2, "demo", ())


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("last", [b"", b"\n", b"\n\n  \r\n"])
def test_however_lines_end(end: bytes, mark: bytes, last: bytes) -> None:
    file = mark + line("a") + end + end + line("ü") + last
    assert check_file(io.BytesIO(file), RULES) == (2, "demo", ())
    found = list(raw_lines(io.BytesIO(file), 1_000))
    assert [read_checked_line(raw)[0] for raw in found] == ["a", "ü"]
    assert [raw.number for raw in found] == [1, 3]
    assert [file[raw.offset : raw.offset + len(raw.data)] for raw in found] == [line("a"), line("ü")]


@pytest.mark.parametrize(
    ("wrong", "code", "said"),
    [
        (b"{", "invalid_json", "not JSON"),
        (b"[]", "invalid_json", "object"),
        (b'"\xff"', "invalid_json", "UTF-8"),
        (line("\0").replace(b"\\u0000", b"\0"), "invalid_json", "not JSON"),
        (line("first"), "duplicate_custom_id", "is also in line 1"),
        (line(7), "invalid_custom_id", "1 to 512"),
        (line(""), "invalid_custom_id", "1 to 512"),
        (line("x" * 513), "invalid_custom_id", "1 to 512"),
        (line(method="GET"), "invalid_method", "POST"),
        (line(url="/v1/completions"), "mismatched_url", "/v1/chat/completions"),
        (line(body="no"), "invalid_body", "object"),
        (line(body={"model": "demo", "stream": True}), "stream_not_supported", "streamed"),
        (line(body={"model": "gpt-9"}), "model_not_found", "gpt-9"),
        (line(body={}), "model_not_found", "None"),
        (line(priority=1), "unknown_parameter", "priority"),
        (line("x" * 1_001), "line_too_long", "1000 bytes"),
    ],
)
def test_one_wrong_line_is_named_and_no_line_is_valid_alone(wrong: bytes, code: str, said: str) -> None:
    _, _, problems = checked(line("first"), wrong, line("last"))
    assert [(problem.code, problem.line) for problem in problems] == [(code, 2)]
    assert said in problems[0].message


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (line("a b"), "a b"),
        (b'{"custom_id" : "\xc3\xa4"}', "\u00e4"),
        (b'{"body": {"custom_id": "b"}, "custom_id": "a"}', None),
        *((data, None) for data in (b"", b"{", b'{"custom_id": 7}', b'{"custom_id": "a', line("a \u00e4"))),
    ],
)
def test_the_name_of_a_line_is_found_without_reading_its_json(data: bytes, name: str | None) -> None:
    assert custom_id_of(RawLine(1, 0, data)) == name


def test_a_line_may_be_as_long_as_is_allowed() -> None:
    longest = line("x", body={"model": "demo", "p": ""})
    padded = longest.replace(b'"p": ""', b'"p": "' + b"y" * (1_000 - len(longest)) + b'"')
    assert len(padded) == 1_000
    for file in (padded, padded + b"\n", padded + b"\r\n" + line("z")):
        assert check_file(io.BytesIO(file), RULES)[2] == ()
    longer = padded.replace(b"y", b"yy", 1)
    assert [problem.code for problem in checked(longer, line("z"))[2]] == ["line_too_long"]


def test_no_more_problems_are_told_than_a_person_would_read() -> None:
    rules = LineRules(Endpoint.CHAT, lambda model: model == "demo", 10_000, 1_000)
    assert len(checked(*[b"{"] * 1_000, rules=rules)[2]) == MOST_PROBLEMS


def test_an_empty_file_and_a_file_with_too_many_lines() -> None:
    assert [problem.code for problem in checked(b"", b"  ")[2]] == ["empty_file"]
    many = [line(str(number)) for number in range(101)]
    assert [(problem.code, problem.line) for problem in checked(*many)[2]] == [("too_many_requests", 101)]


def test_lines_of_ten_megabytes_are_not_held_in_memory() -> None:
    file = io.BytesIO(b"\n".join([b"x" * 10_000_000, line("a"), b"y" * 10_000_000]))
    tracemalloc.start()
    _, _, problems = check_file(file, RULES)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [(problem.code, problem.line) for problem in problems] == [
        ("line_too_long", 1),
        ("line_too_long", 3),
    ]
    assert peak < 1_000_000


@given(st.binary(max_size=400), st.integers(1, 50))
def test_whatever_bytes_there_are_they_are_read_as_python_splits_them(data: bytes, most_bytes: int) -> None:
    found = {raw.number: raw for raw in raw_lines(io.BytesIO(data), most_bytes)}
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    filled = {number for number, line in enumerate(lines, 1) if line.strip(b" \t\r\n")}
    assert {number for number, raw in found.items() if not raw.is_cut} <= filled
    for number, raw in found.items():
        assert data[raw.offset : raw.offset + len(raw.data)] == raw.data
        assert raw.is_cut or lines[number - 1].rstrip(b"\r") == raw.data.rstrip(b"\r")


@pytest.mark.parametrize(
    "usage",
    [
        {
            "prompt_tokens": 9,
            "completion_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 4},
            "completion_tokens_details": {"reasoning_tokens": 5},
        },
        {
            "input_tokens": 9,
            "output_tokens": 7,
            "input_tokens_details": {"cached_tokens": 4},
            "output_tokens_details": {"reasoning_tokens": 5},
        },
    ],
    ids=["chat", "response"],
)
def test_the_tokens_of_an_answer_count_for_its_line(usage: dict[str, Any]) -> None:
    result = answered_line(3, "c", "r", 200, {"usage": usage})
    counted = result.input_tokens, result.cached_tokens, result.output_tokens, result.reasoning_tokens
    assert counted == (9, 4, 7, 5)
    assert answered_line(3, "c", "r", 200, {"usage": {"prompt_tokens": 9}}).reasoning_tokens == 0


@pytest.mark.parametrize(("energy", "modelled"), [("rapl", 0.0), ("modelled", 5.021)])
def test_a_batch_says_what_its_answers_used(energy: str, modelled: float) -> None:
    costs = [{"cost": {"device_seconds": 1.25, "joules": 5.021, "energy": energy}}, {}]
    results = [answered_line(at, "c", "r", 200, {"usage": usage}) for at, usage in enumerate(costs)]
    job = Job("batch_1", "key", "file-1", Endpoint.CHAT, "24h", 1_000, 87_400)
    usage = batch_object(job, results[0].counts + results[1].counts, Prices())["usage"]
    assert usage["cost"] == {"device_seconds": 1.25, "joules": 5.021, "modelled_joules": modelled}
    assert "cost" not in batch_object(job, results[1].counts, Prices())["usage"]


def test_a_batch_says_how_much_of_its_output_was_reasoning() -> None:
    job = Job("batch_1", "key", "file-1", Endpoint.CHAT, "24h", 1_000, 87_400)
    usage = batch_object(job, LineCounts(2, 0, 9, 4, 7, 5), Prices())["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 5}


@pytest.mark.parametrize(("per_line", "is_kept"), [(25_000, True), (25_001, False)])
def test_a_batch_has_so_many_inputs(per_line: int, is_kept: bool) -> None:
    rules = LineRules(Endpoint.EMBEDDINGS, lambda model: model == "demo", 100, 1_000_000)
    body = {"model": "demo", "input": ["a"] * per_line}
    line: dict[str, Any] = {"method": "POST", "url": "/v1/embeddings", "body": body}
    made = [{"custom_id": str(at), **line} for at in range(2)]
    made.append(made[0] | {"custom_id": "tokens", "body": {"model": "demo", "input": [1] * 9}})
    _, _, problems = check_file(io.BytesIO("\n".join(map(json.dumps, made[: 2 + (not is_kept)])).encode()), rules)
    assert [problem.code for problem in problems] == ([] if is_kept else ["too_many_requests"])
