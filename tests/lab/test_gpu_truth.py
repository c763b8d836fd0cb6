"""Step times of real GPUs: the grids as measured, and plausible values in between and beyond."""

from __future__ import annotations

import json
from functools import cache
from statistics import median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.core import Chunk, Decode, KvForm, Sampling, StepPlan
from alignedserve.errors import ProfileError
from alignedserve.lab.devices.gpu_truth import FOLDER, GpuTruth, load, names

PRO = "rtxpro6000-llama-3.1-8b-tp1"


@pytest.fixture(params=names())
def truth(request: pytest.FixtureRequest) -> GpuTruth:
    return load(request.param)


def profile_of(name: str) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return tree


def test_the_profiles_that_are_there() -> None:
    assert names() == [
        "a100-codellama-34b-tp2",
        "rtx4090-llama-3.1-8b-tp1",
        PRO,
        "rtxpro6000-llama-3.1-8b-tp2",
        "rtxpro6000-qwen3-32b-tp1",
        "rtxpro6000-qwen3-32b-tp2",
    ]


@pytest.mark.parametrize("name", names())
def test_each_is_small_and_says_where_it_is_from(name: str) -> None:
    path = FOLDER / f"{name}.json"
    assert path.stat().st_size <= 100_000
    tree = profile_of(name)
    about, of_links = tree["about"], [tree["all_reduce"]] if "all_reduce" in tree else []
    for source in (about["source"], *(link["source"] for link in of_links)):
        assert source.startswith(("github.com/casys-kaist/LLMServingSim, ", "github.com/microsoft/vidur, "))
    kind, _, rest = about["licence"].partition(", ")
    licence = (FOLDER / "LICENSE").read_text(encoding="utf-8")
    assert kind == "MIT"
    assert "MIT License" in licence
    assert rest.partition(";")[0] in licence


# A decode-only step in milliseconds, from ../shared/traces/README.md.
DECODES = {
    PRO: (11.17, 0.0194, 8.72e-5),
    "rtxpro6000-qwen3-32b-tp1": (45.87, 0.0812, 1.74e-4),
    "rtx4090-llama-3.1-8b-tp1": (16.95, 0.0421, 1.39e-4),
}


@pytest.mark.parametrize(("name", "line"), DECODES.items())
def test_decode_steps_are_the_line_that_others_fitted_to_them(name: str, line: tuple[float, float, float]) -> None:
    fixed, request, token = line
    off = []
    for count in (1, 4, 10, 32, 100, 256):
        for prefix in (100, 500, 2000, 8000):
            expected = fixed + request * count + token * count * prefix
            off.append(abs(1e3 * load(name).seconds_of([], [prefix] * count) / expected - 1))
    assert median(off) < 0.03


def test_a_measured_attention_comes_back() -> None:
    tree = profile_of(PRO)
    pro = GpuTruth(tree)
    requests, prefixes = tree["decode"]["axes"]
    for row, count in zip(tree["decode"]["values"], requests, strict=True):
        for measured, prefix in zip(row, prefixes, strict=True):
            assert pro.attention_us([], [prefix] * count) == pytest.approx(measured)
    chunks, cached = tree["prefill"]["axes"]
    for row, chunk in zip(tree["prefill"]["values"], chunks, strict=True):
        for measured, before in zip(row, cached, strict=True):
            assert pro.attention_us([(chunk, before)], []) == pytest.approx(measured)
    factor = tree["mixed"]["values"][2][4][3][5] / 1000
    chunk, before, count, prefix = (axis[at] for axis, at in zip(tree["mixed"]["axes"], (2, 4, 3, 5), strict=True))
    parts = pro.attention_us([(chunk, before)], []) + pro.attention_us([], [prefix] * count)
    assert pro.attention_us([(chunk, before)], [prefix] * count) == pytest.approx(factor * parts)


def test_mixed_attention_costs_more_than_its_parts(truth: GpuTruth) -> None:
    """Only the median is tested, not every point; the A100's parts were measured one after the other."""
    factors = []
    for chunk in (64, 256, 1024):
        for count in (4, 16, 64):
            for prefix in (256, 1024, 4096):
                mixed = truth.attention_us([(chunk, 512)], [prefix] * count)
                apart = truth.attention_us([(chunk, 512)], []) + truth.attention_us([], [prefix] * count)
                factors.append(mixed / apart)
    least, most = (1, 1) if truth.about["gpu"] == "A100 80GB" else (1.1, 2)
    assert least <= median(factors) <= most


def test_unequal_lengths_cost_more(truth: GpuTruth) -> None:
    """Decode-only steps cost a few per cent more (median), far less than if all were as long as the longest."""
    aligned, uneven = [1600] * 64, [1024] * 52 + [4096] * 12
    same, skewed = truth.attention_us([], aligned), truth.attention_us([], uneven)
    assert sum(aligned) == pytest.approx(sum(uneven), rel=0.01)
    assert same < skewed < 1.3 * same
    assert skewed < 0.7 * truth.attention_us([], [4096] * 64)


def test_more_takes_longer(truth: GpuTruth) -> None:
    """The device is busy at these sizes; small sizes are measured with noise."""
    tokens = [truth.seconds_of([(length, 0)], []) for length in (256, 512, 1024, 2048, 4096)]
    cached = [truth.seconds_of([(256, before)], []) for before in (0, 1024, 4096, 16_384, 40_000)]
    decodes = [truth.seconds_of([], [2000] * count) for count in (8, 32, 100, 256, 400)]
    for times in (tokens, cached, decodes):
        assert times == sorted(times)


sizes = st.integers(0, 30_000)


@settings(deadline=None)
@given(
    st.sampled_from(names()),
    st.lists(st.tuples(st.integers(1, 3000), sizes), max_size=4),
    st.lists(sizes, max_size=40),
)
def test_every_step_takes_some_time(name: str, chunks: list[tuple[int, int]], prefixes: list[int]) -> None:
    took = _loaded(name).seconds_of(chunks, prefixes)
    assert (took > 0) == bool(chunks or prefixes)
    assert took < 100


_loaded = cache(load)


@pytest.mark.parametrize(
    ("name", "layers", "latency_us", "token_bytes", "gb_s"),
    [
        ("rtxpro6000-llama-3.1-8b-tp2", 32, 13.3, 2 * 4096, 36.9),
        ("rtxpro6000-qwen3-32b-tp2", 64, 13.3, 2 * 5120, 36.9),
        ("a100-codellama-34b-tp2", 48, 6.8, 2 * 8192, 142.0),
    ],
)
@pytest.mark.parametrize(
    ("chunks", "prefixes"), [([], [700]), ([], [700] * 128), ([(2048, 0)], []), ([(1000, 500)], [300] * 24)]
)
def test_ranks_sum_their_parts_twice_a_layer(
    name: str,
    layers: int,
    latency_us: float,
    token_bytes: int,
    gb_s: float,
    chunks: list[tuple[int, int]],
    prefixes: list[int],
) -> None:
    tree = profile_of(name)
    one_rank = GpuTruth({**tree, "about": {**tree["about"], "tensor_parallel": 1}})
    tokens = sum(length for length, _ in chunks) + len(prefixes)
    longer = GpuTruth(tree).seconds_of(chunks, prefixes) - one_rank.seconds_of(chunks, prefixes)
    assert longer == pytest.approx(2 * layers * (1e-6 * latency_us + tokens * token_bytes / (1e9 * gb_s)))


def test_a_profile_of_several_gpus_without_their_all_reduce_is_refused() -> None:
    tree = profile_of("rtxpro6000-qwen3-32b-tp2")
    del tree["all_reduce"]
    with pytest.raises(ProfileError, match=r"Qwen3-32B on 2 x RTX PRO 6000 has no all_reduce.*: add it"):
        GpuTruth(tree)


def test_a_plan_takes_what_its_parts_do() -> None:
    truth = load(PRO)
    last = Chunk("a", (1,) * 100, 50, KvForm((0,)), Sampling())
    first = Chunk("b", (1,) * 70, 0, KvForm((1,)), None)  # a chunk that samples nothing
    decodes = tuple(Decode("c", 1, prefix, KvForm((2,)), Sampling(), 0) for prefix in (300, 500))
    expected = truth.seconds_of([(100, 50), (70, 0)], [300, 500], sampled=3)
    assert truth.seconds(StepPlan(0, (last, first), decodes)) == expected
    assert expected < truth.seconds_of([(100, 50), (70, 0)], [300, 500])
    assert truth.seconds(StepPlan(0)) == 0


def test_what_is_not_there_is_told_in_one_line() -> None:
    with pytest.raises(ProfileError, match="there is no GPU profile 'a100': there are a100-"):
        load("a100")
    with pytest.raises(ProfileError, match="format 1 is needed"):
        GpuTruth({"format": 0})
