"""What is sampled depends on logits, seed and index alone, and follows the distribution that was asked for."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import pairwise
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.core import Sampling
from alignedserve.engine.sampling import sample, uniform

T = TypeVar("T")
INF = math.inf
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.one_of(st.just(0.0), st.floats(1e-6, 100.0)),
    top_k=st.integers(0, 12),
    top_p=st.floats(1e-9, 1.0, exclude_min=True),
    seed=st.integers(-(2**63), 2**63 - 1),
)
INDEXES = st.integers(0, 100_000)
LOGITS = st.lists(st.floats(-30, 30, width=32), min_size=10, max_size=10)
ROWS = st.lists(st.tuples(LOGITS, SAMPLINGS, INDEXES), min_size=1, max_size=6)
plain = settings(deadline=None, max_examples=60)


def alone(logits: list[float] | torch.Tensor, sampling: Sampling, index: int = 0) -> int:
    return sample(torch.as_tensor(logits)[None], [(sampling, index)])[0]


def drawn(logits: list[float], sampling: Sampling, count: int) -> Counter[int]:
    rows = torch.tensor(logits).expand(count, -1)
    return Counter(sample(rows, [(sampling, index) for index in range(count)]))


@given(rows=ROWS, order=st.randoms(use_true_random=False))
@plain
def test_a_token_does_not_depend_on_its_batch(
    rows: list[tuple[list[float], Sampling, int]], order: random.Random
) -> None:
    expected = [alone(*row) for row in rows]
    places = list(range(len(rows)))
    order.shuffle(places)
    together = sample(torch.tensor([rows[place][0] for place in places]), [rows[place][1:] for place in places])
    assert together == [expected[place] for place in places]


@given(logits=LOGITS, sampling=SAMPLINGS, index=INDEXES)
@plain
def test_the_same_seed_and_index_give_the_same_token(logits: list[float], sampling: Sampling, index: int) -> None:
    assert alone(logits, sampling, index) == alone(logits, sampling, index)


def test_seeds_and_indexes_are_as_good_as_independent() -> None:
    """Along the indexes of one seed, along the seeds of one index, and along the diagonal of both."""
    sampling = Sampling(temperature=1.0)
    flat = [0.0] * 8
    ways = [
        [alone(flat, sampling, index) for index in range(4_000)],
        [alone(flat, Sampling(1.0, seed=seed), 0) for seed in range(4_000)],
        [alone(flat, Sampling(1.0, seed=seed), 4_000 - seed) for seed in range(4_000)],
    ]
    for way in ways:
        pairs = Counter(pairwise(way))  # of neighbours, all 64 should come alike
        assert chi_square(pairs, {(a, b): 3_999 / 64 for a in range(8) for b in range(8)}) < 120  # p = 2e-5 at 63


def chi_square(seen: Counter[T], expected: dict[T, float]) -> float:
    assert set(seen) <= set(expected)
    return sum((seen[what] - count) ** 2 / count for what, count in expected.items())


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("seed", [0, 1, -5, 2**62])
def test_the_distribution_is_the_softmax(temperature: float, seed: int) -> None:
    logits = [1.5, -0.5, 0.0, 1.4, -1.0, 0.7, 2.0, -2.0]
    count = 6_000
    seen = drawn(logits, Sampling(temperature, seed=seed), count)
    shares = (torch.tensor(logits).double() / temperature).softmax(0).tolist()
    often = {token: share * count for token, share in enumerate(shares) if share * count >= 5}
    rest = sum(shares) * count - sum(often.values())
    assert sum(seen.values()) - sum(seen[token] for token in often) <= rest + 6 * math.sqrt(rest) + 1
    few = Counter({token: times for token, times in seen.items() if token in often})
    assert chi_square(few, often) < 40  # p = 1e-6 at 7 degrees of freedom


@given(
    logits=st.lists(st.sampled_from([-INF, -3.0, -1.0, -0.5, 0.0, 0.5, 1.0]), min_size=1, max_size=12),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([0.05, 0.3, 0.61, 0.9, 0.999, 1.0]),
    temperature=st.sampled_from([0.5, 1.0, 3.0]),
)
@settings(deadline=None, max_examples=80)
def test_top_k_and_top_p_keep_exactly_the_right_tokens(
    logits: list[float], top_k: int, top_p: float, temperature: float
) -> None:
    logits[0] = 0.25  # one of them at least is possible
    kept = naive(logits, top_k, top_p, temperature)
    seen = drawn(logits, Sampling(temperature, top_k, top_p, seed=3), 400)
    assert set(seen) <= set(kept)
    rare = {token for token, share in kept.items() if share < 0.04}  # may not come in 400 draws
    assert set(kept) - rare <= set(seen)


def naive(logits: list[float], top_k: int, top_p: float, temperature: float) -> dict[int, float]:
    """Probability of each token that is kept; of equal ones the lower number goes first."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    order = order[: top_k or None]
    weights = {token: math.exp(logits[token] / temperature) for token in order}
    total = sum(weights.values())
    kept: dict[int, float] = {}
    for token, weight in weights.items():
        if weight and sum(kept.values()) < top_p - 1e-12:
            kept[token] = weight / total
    return {token: share / sum(kept.values()) for token, share in kept.items()}


@pytest.mark.parametrize(
    ("sampling", "tokens"),
    [
        (Sampling(), {3}),
        (Sampling(temperature=1e-6), {3}),
        (Sampling(temperature=1e-300), {3}),
        (Sampling(temperature=100.0), {0, 1, 2, 3, 4}),
        (Sampling(temperature=1e300), {0, 1, 2, 3, 4}),
        (Sampling(temperature=1.0, top_p=1e-9), {3}),
        (Sampling(temperature=100.0, top_p=1e-9), {3}),
        (Sampling(temperature=100.0, top_k=1), {3}),
        (Sampling(temperature=100.0, top_k=2), {3, 2}),
        (Sampling(temperature=100.0, top_k=5), {0, 1, 2, 3, 4}),
        (Sampling(temperature=100.0, top_k=2**62), {0, 1, 2, 3, 4}),
    ],
)
def test_extremes(sampling: Sampling, tokens: set[int]) -> None:
    assert set(drawn([0.0, 1.0, 4.0, 5.0, -2.0], sampling, 200)) == tokens


def test_equal_logits() -> None:
    flat = [7.0] * 40
    assert alone(flat, Sampling()) == 0
    assert set(drawn(flat, Sampling(1.0), 600)) == set(range(40))
    assert set(drawn(flat, Sampling(1.0, top_k=3), 100)) == {0, 1, 2}, "the first of them, in a stable order"
    assert set(drawn(flat, Sampling(1e-6, top_p=0.5), 300)) == set(range(20))


@pytest.mark.parametrize("temperature", [1e-6, 1.0, 100.0, 1e300])
def test_what_is_impossible_never_comes(temperature: float) -> None:
    logits = [-INF, 1.0, -INF, 0.999, -INF]
    for top_k, top_p in ((0, 1.0), (4, 1.0), (0, 0.999999), (4, 0.999999)):
        assert set(drawn(logits, Sampling(temperature, top_k, top_p, seed=9), 300)) <= {1, 3}
    assert alone([-INF, -INF, 3.0], Sampling(temperature)) == 2


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2.0**-53])
def test_the_first_and_the_last_number_stay_inside(monkeypatch: pytest.MonkeyPatch, number: float) -> None:
    """Rounding in the sums gives no token to a number beyond the last possible one."""
    monkeypatch.setattr("alignedserve.engine.sampling.uniform", lambda *_: number)
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        logits = torch.randn(300, generator=generator) * 3
        logits[200:] = -INF
        assert alone(logits, Sampling(1.0)) < 200
        assert alone(logits, Sampling(1.0, top_p=0.99)) < 200
    assert alone([0.0, -800.0], Sampling(1.0)) == 0, "a share of nothing gets nothing"


def test_a_large_vocabulary() -> None:
    logits = torch.zeros(128_256)
    logits[77] = 60.0
    assert {alone(logits, Sampling(1.0, seed=seed)) for seed in range(20)} == {77}


@given(seed=st.integers(-(2**64), 2**64), index=st.integers(0, 2**64))
def test_uniform_is_at_least_0_and_below_1(seed: int, index: int) -> None:
    assert 0 <= uniform(seed, index) < 1


def test_uniform_is_well_spread_and_its_own_from_machine_to_machine() -> None:
    numbers = [uniform(seed, index) for seed in (0, 1, 2, 3) for index in range(2_500)]
    assert chi_square(Counter(int(number * 20) for number in numbers), dict.fromkeys(range(20), 500.0)) < 60
    assert chi_square(Counter(int(number * 2**20) % 16 for number in numbers), dict.fromkeys(range(16), 625.0)) < 55
    assert len(set(numbers)) == len(numbers)
    assert uniform(0, 0) == 0.6524484863740322
    assert uniform(42, 7) == 0.9929056469208896
    assert uniform(-1, 1) == 0.4077623770414702


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": INF},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
    ],
)
def test_a_sampling_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)  # type: ignore[arg-type]
