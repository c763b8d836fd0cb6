"""Traces as they were recorded: prompts share blocks, a seed draws windows, predictions are as wrong as real ones."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import pytest

from alignedserve.core import Estimate
from alignedserve.errors import SimulateError, WorkloadError
from alignedserve.lab.loads.workload import Arrival, arrivals
from alignedserve.lab.loads.workload.spec import read_workload
from alignedserve.lab.loads.workload.stream import Foresight, Predictions, prediction_table
from alignedserve.lab.reports.figures import RunFigures
from alignedserve.lab.reports.trial import SimulationTrial
from alignedserve.lab.simulator.clients import oracle_estimate
from alignedserve.lab.trials.building import settings_of
from alignedserve.lab.trials.running import run_once

ORACLE = ("schedule.predictor=oracle",)
MOONCAKE = """\
{"timestamp": 27482, "input_length": 6955, "output_length": 52, \
"hash_ids": [46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 2353, 2354]}
{"timestamp": 30535, "input_length": 6472, "output_length": 26, \
"hash_ids": [46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 2366]}
"""  # the example of its README


def row(at_ms: int, prompt: int, ids: Sequence[int], output: int = 20) -> dict[str, Any]:
    return {"timestamp": at_ms, "input_length": prompt, "output_length": output, "hash_ids": list(ids)}


def write(folder: Path, rows: Sequence[dict[str, Any]], name: str = "blocks.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(each) + "\n" for each in rows))
    return f"trace:{folder / name}"


def chats(count: int, *, shared: int, own: int) -> list[dict[str, Any]]:
    """Return requests, half a second apart, whose prompts have some blocks in common and some of their own."""
    common = list(range(shared))
    return [
        row(500 * at, 512 * (shared + own), [*common, *range(shared + at * own, shared + (at + 1) * own)])
        for at in range(count)
    ]


def found(text: str, seed: int = 1) -> list[Arrival]:
    return list(arrivals(read_workload(text), ("gateway-0",), seed, 0.0))


def num_alike(one: Arrival, other: Arrival) -> int:
    both = zip(one.request.prompt, other.request.prompt, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))


# --- Blocks


def test_the_published_format_is_read(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(MOONCAKE)
    first, second = found(f"trace:{tmp_path}/trace.jsonl")
    assert [(len(each.request.prompt), each.length) for each in (first, second)] == [(6955, 52), (6472, 26)]
    assert second.request.arrival_at - first.request.arrival_at == pytest.approx(3.053)
    assert num_alike(first, second) == 12 * 512


def test_prompts_share_the_tokens_of_their_first_blocks_and_no_more(tmp_path: Path) -> None:
    trace = write(tmp_path, [row(0, 1500, [1, 2, 3]), row(5, 1200, [1, 2, 9]), row(5, 700, [2, 1]), row(9, 100, [1])])
    one, two, swapped, short = found(trace)
    assert (num_alike(one, two), num_alike(one, swapped), num_alike(one, short)) == (1024, 0, 100)
    assert found(trace, seed=2)[0].request.prompt != one.request.prompt


def test_a_prompt_that_is_cut_keeps_its_beginning(tmp_path: Path) -> None:
    trace = write(tmp_path, [row(0, 1500, [1, 2, 3]), row(5, 1500, [1, 2, 4])])
    whole, (first, second) = found(trace), found(f"{trace},context=1100")
    assert first.request.prompt == whole[0].request.prompt[: len(first.request.prompt)]
    assert num_alike(first, second) == 1024


@pytest.mark.parametrize("cluster", ["colocated", "1+1"])
def test_the_prefix_cache_finds_what_prompts_share(tmp_path: Path, cluster: str) -> None:
    """Of 12 prompts 6 of 8 blocks are the same: the first computes them, and the others have them."""
    trace = write(tmp_path, chats(12, shared=6, own=2))
    record = run_once(SimulationTrial("aligned", trace, cluster), lambda _ended, _all: None)
    assert record.problems == ()
    computed = RunFigures.from_record(record).prompts_computed
    assert computed == pytest.approx((8 + 11 * 2) / (12 * 8), abs=0.02)


def test_lengths_alone_are_drawn_from_such_a_trace_too(tmp_path: Path) -> None:
    trace = write(tmp_path, [row(0, 1500, [1, 2, 3]), row(5, 700, [1, 2], output=3)])
    drawn = found(f"lengths:{trace.removeprefix('trace:')},rate=4,num_requests=40")
    assert {(len(each.request.prompt), each.length) for each in drawn} == {(1500, 20), (700, 3)}
    assert num_alike(*drawn[:2]) < 8


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"timestamp": 9, "input_length": 5, "hash_ids": [1]}', "output_length is missing: fill it in, or remove"),
        ('{"timestamp": null, "input_length": 5}', "timestamp is missing: fill it in, or remove the line"),
        ('{"timestamp": 9, "input_length": 5, "output_length": 5}', "hash_ids is missing: fill it in"),
        ('{"timestamp": 9, "input_', "is not a JSON object such as {'timestamp': 0, ...}: complete it, or remove it"),
        ("[1, 2]", "is not a JSON object"),
        (json.dumps(row(9, 513, [1])), "hash_ids has 1 ids for a prompt of 513 tokens, which is 2 blocks of 512"),
        (json.dumps(row(9, 5, [1, 2])), "hash_ids has 2 ids for a prompt of 5 tokens, which is 1 blocks"),
        (json.dumps(row(9, 5, [1]) | {"hash_ids": ["a"]}), "hash_ids must be a list of whole numbers"),
        (json.dumps(row(3, 5, [1])), "timestamp is earlier than in the line before: sort the file by it"),
        ('{"timestamp": "soon"}', "timestamp must be a number of milliseconds, not 'soon'"),
        (json.dumps(row(9, -1, [1])), "input_length must be a whole number of 0 or more"),
        (json.dumps(row(9, 10**9, [1])), "input_length must be a whole number of 0 or more, below a billion"),
        (json.dumps(row(9, 5, [1], output=10**9)), "output_length must be a whole number of 0 or more, below"),
        ('{"timestamp": 9, "input_length": 5.5}', "input_length must be a whole number of 0 or more"),
    ],
)
def test_a_hole_is_named_with_its_line_and_what_to_do(tmp_path: Path, line: str, problem: str) -> None:
    good = json.dumps(row(5, 5, [1]))
    (tmp_path / "wrong.jsonl").write_text(f"{good}\n{good}\n{line}\n{good}\n")
    with pytest.raises(WorkloadError, match=r"wrong\.jsonl line 3.*" + re.escape(problem)) as caught:
        read_workload(f"trace:{tmp_path}/wrong.jsonl")
    assert "\n" not in str(caught.value)


def test_rows_without_tokens_are_left_out_and_blank_lines_are_none(tmp_path: Path) -> None:
    rows = [row(0, 600, [1, 2]), row(1, 5, [3], output=0), row(2, 0, [])]
    (tmp_path / "some.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    (stream,) = read_workload(f"trace:{tmp_path}/some.jsonl").streams
    assert stream.notes == ("some.jsonl: 2 of 3 rows have no prompt or no output, and were left out",)


# --- Windows


def test_a_seed_draws_windows_and_another_seed_draws_others(tmp_path: Path) -> None:
    trace = write(tmp_path, chats(80, shared=1, own=1))
    recorded = [(each.request.arrival_at, each.length) for each in found(trace)]
    one, again, other = (found(f"{trace},window_s=4", seed) for seed in (1, 1, 2))
    assert [(each.request.arrival_at, each.length) for each in found(trace, seed=2)] == recorded
    assert one == again
    assert [each.request.prompt[512:] for each in one] != [each.request.prompt[512:] for each in other]


def test_windows_come_whole_and_last_as_long_as_the_trace(tmp_path: Path) -> None:
    """Windows of the trace have one request, two, ..., ten, all at their begin but the last."""
    rows = [row(10_000 * window, 100, [0], output=window + 1) for window in range(10) for _ in range(window + 1)]
    trace = write(tmp_path, [*rows, row(100_000, 100, [0], output=1)])
    drawn = found(f"{trace},window_s=10", seed=3)
    came = Counter(round(each.request.arrival_at) for each in drawn if each.length > 1)
    for at, count in came.items():
        assert {each.length for each in drawn if round(each.request.arrival_at) == at} - {1} == {count}
    assert len({each.length for each in drawn}) < 10  # some windows come again, others do not come
    assert drawn[-1].request.arrival_at <= 100


def test_a_window_that_comes_again_shares_only_what_windows_share(tmp_path: Path) -> None:
    drawn = found(f"{write(tmp_path, chats(80, shared=2, own=1))},window_s=4")
    assert {num_alike(one, other) for one, other in pairwise(drawn)} == {1024}
    assert len({each.request.prompt for each in drawn}) == len(drawn)


def test_a_trace_in_csv_is_drawn_from_its_windows_too(tmp_path: Path) -> None:
    lines = "".join(f"{at},{100 + at},{1 + at}\n" for at in range(100))
    (tmp_path / "trace.csv").write_text(f"arrival_s,prompt_tokens,output_tokens\n{lines}")
    drawn = found(f"trace:{tmp_path}/trace.csv,window_s=10,rate_scale=2")
    pairs = [(len(each.request.prompt), each.length) for each in drawn]
    assert all(prompt - output == 99 for prompt, output in pairs)
    assert [output % 10 for _, output in pairs] == [output % 10 for output in range(1, len(pairs) + 1)]
    assert drawn[1].request.arrival_at - drawn[0].request.arrival_at == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("window_s=60", "window_s must be at most half of the 39.5 s that the trace lasts"),
        ("window_s=0", "window_s must be more than 0"),
    ],
)
def test_windows_that_are_none(tmp_path: Path, key: str, problem: str) -> None:
    trace = write(tmp_path, chats(80, shared=1, own=1))
    with pytest.raises(WorkloadError, match=re.escape(problem)):
        read_workload(f"{trace},{key}")
    with pytest.raises(WorkloadError, match="window_s is not a key of"):
        read_workload("chat,window_s=5")


# --- Predictions


def test_an_oracle_is_as_wrong_as_a_real_predictor() -> None:
    exact, wrong = found("chat,num_requests=300"), found("chat,num_requests=300,predicted=lmsys")
    assert [each.request for each in exact] == [each.request for each in wrong]
    assert all(oracle_estimate(each) == Estimate(each.length, each.length) for each in exact)
    said = set(prediction_table(Predictions.LMSYS).said)
    assert len(said) == 5
    assert {oracle_estimate(each) for each in wrong} == said
    assert wrong == found("chat,num_requests=300,predicted=lmsys")


@pytest.mark.parametrize(("source", "in_order"), [(Predictions.LMSYS, 0.78), (Predictions.SHAREGPT, 0.92)])
def test_drawn_predictions_have_the_measured_order_and_coverage(source: Predictions, in_order: float) -> None:
    """Measured: the shares of the published pairs that the tables were compiled from."""
    table, draw = prediction_table(source), Random(1)
    edges = (1, *table.edges, round(1.5 * table.edges[-1]))
    lengths = [draw.randint(*draw.choice(list(pairwise(edges)))) for _ in range(3000)]
    said = [table.draw(length, draw) for length in lengths]
    pairs = [(draw.randrange(3000), draw.randrange(3000)) for _ in range(20_000)]
    ordered = [
        0.5
        if said[one].mean == said[other].mean
        else (said[one].mean > said[other].mean) == (lengths[one] > lengths[other])
        for one, other in pairs
        if lengths[one] != lengths[other]
    ]
    assert fmean(ordered) == pytest.approx(in_order, abs=0.03)
    assert fmean(length <= each.upper for length, each in zip(lengths, said, strict=True)) == pytest.approx(
        0.9, abs=0.03
    )


def test_wrong_predictions_reach_the_router() -> None:
    trial = SimulationTrial("aligned", "chat,num_requests=5,predicted=lmsys", options=ORACLE)
    assert {stream.foresight for stream in settings_of(trial).workload.streams} == {Foresight(Predictions.LMSYS)}
    assert run_once(trial, lambda _ended, _all: None).problems == ()


def test_wrong_predictions_that_nobody_would_hear_are_refused() -> None:
    with pytest.raises(SimulateError, match=r"predicted has no effect without --set schedule.predictor=oracle"):
        settings_of(SimulationTrial("aligned", "chat,predicted=lmsys"))
