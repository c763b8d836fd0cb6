"""Tests that samples depend on logits, history, seed and index alone, and follow the requested distribution."""

from __future__ import annotations

import math
import random
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.core import Choice, History, Sampling
from alignedserve.engine.sampling import edits as of_edits
from alignedserve.engine.sampling.edits import Edits, edit_logits
from alignedserve.engine.sampling.sampling import _KEPT, REFERENCE, NextToken, Sampler, uniform
from alignedserve.text.token_sets import pack_tokens, unpack_tokens
from tests.conftest import SOAK, examples

T = TypeVar("T")
INF = math.inf
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.one_of(st.just(0.0), st.floats(1e-6, 100.0)),
    top_k=st.integers(0, 12),
    top_p=st.floats(1e-9, 1.0, exclude_min=True),
    seed=st.integers(-(2**63), 2**63 - 1),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
)
INDEXES = st.integers(0, 100_000)
LOGITS = st.lists(st.floats(-30, 30, width=32), min_size=10, max_size=10)
ROWS = st.lists(st.tuples(LOGITS, SAMPLINGS, INDEXES), min_size=1, max_size=6)
plain = settings(deadline=None, max_examples=examples(60))


def choose(logits: torch.Tensor, wanted: Sequence[tuple[Sampling, int]]) -> list[int | None]:
    tokens = [NextToken(sampling, index) for sampling, index in wanted]
    return [sampled.token for sampled in Sampler(logits.shape[1]).sample(logits, tokens)]


def alone(logits: list[float] | torch.Tensor, sampling: Sampling, index: int = 0) -> int:
    (token,) = choose(torch.as_tensor(logits).clone()[None], [(sampling, index)])
    assert token is not None
    return token


def drawn(logits: list[float], sampling: Sampling, count: int) -> Counter[int]:
    rows = torch.tensor(logits).repeat(count, 1)
    tokens = choose(rows, [(sampling, index) for index in range(count)])
    return Counter(token for token in tokens if token is not None)


@given(rows=ROWS, order=st.randoms(use_true_random=False))
@plain
def test_a_token_does_not_depend_on_its_batch(
    rows: list[tuple[list[float], Sampling, int]], order: random.Random
) -> None:
    expected = [alone(*row) for row in rows]
    places = list(range(len(rows)))
    order.shuffle(places)
    together = choose(torch.tensor([rows[place][0] for place in places]), [rows[place][1:] for place in places])
    assert together == [expected[place] for place in places]


@given(st.integers(0, 2**32), st.integers(100, 700), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=examples(40))
def test_nor_does_it_where_rows_have_many_blocks(seed: int, vocabulary: int, order: random.Random) -> None:
    """Rows are peaked and flat, so that some find their top-p at once and others only at the second or third search."""
    generator = torch.Generator().manual_seed(seed)
    steepness = torch.tensor([0.0, 0.3, 1.0, 4.0, 12.0, 12.0])[:, None]
    rows = (torch.randn(6, vocabulary, generator=generator) * steepness).bfloat16().float()  # many logits are equal
    wanted = [
        (Sampling(order.choice([0.0, 0.5, 1.0, 3.0]), order.choice([0, 1, 40, 400]), order.choice([0.3, 0.95, 1.0])), 5)
        for _ in rows
    ]
    expected = [alone(row, *wish) for row, wish in zip(rows, wanted, strict=True)]
    places = order.sample(range(6), 6)
    assert choose(rows[places], [wanted[place] for place in places]) == [expected[place] for place in places]


@given(logits=LOGITS, sampling=SAMPLINGS, index=INDEXES)
@plain
def test_the_same_seed_and_index_give_the_same_token(logits: list[float], sampling: Sampling, index: int) -> None:
    assert alone(logits, sampling, index) == alone(logits, sampling, index)


NUM_DRAWN = 4_000 if SOAK else 1_500


def test_seeds_and_indexes_are_as_good_as_independent() -> None:
    """Compare along the indexes of one seed, along the seeds of one index, and along the diagonal of both."""
    sampling = Sampling(temperature=1.0)
    ways: list[list[tuple[Sampling, int]]] = [
        [(sampling, index) for index in range(NUM_DRAWN)],
        [(Sampling(1.0, seed=seed), 0) for seed in range(NUM_DRAWN)],
        [(Sampling(1.0, seed=seed), NUM_DRAWN - seed) for seed in range(NUM_DRAWN)],
    ]
    for way in ways:
        # All 64 pairs of neighbours should be equally frequent.
        pairs = Counter(pairwise(token for token in choose(torch.zeros(NUM_DRAWN, 8), way) if token is not None))
        assert (
            chi_square(pairs, {(a, b): (NUM_DRAWN - 1) / 64 for a in range(8) for b in range(8)}) < 120
        )  # p = 2e-5 at 63


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
    rest = max(0.0, sum(shares) * count - sum(often.values()))  # rounding may make it negative
    assert sum(seen.values()) - sum(seen[token] for token in often) <= rest + 6 * math.sqrt(rest) + 1
    few = Counter({token: times for token, times in seen.items() if token in often})
    assert chi_square(few, often) < 40  # p = 1e-6 at 7 degrees of freedom


@given(
    logits=st.lists(st.sampled_from([-INF, -3.0, -1.0, -0.5, 0.0, 0.5, 1.0]), min_size=1, max_size=12),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([0.05, 0.3, 0.61, 0.9, 0.999, 1.0]),
    temperature=st.sampled_from([0.5, 1.0, 3.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 0.4]),
)
@settings(deadline=None, max_examples=examples(80))
def test_min_p_top_k_and_top_p_keep_exactly_the_right_tokens(
    logits: list[float], top_k: int, top_p: float, temperature: float, min_p: float
) -> None:
    logits[0] = 0.25  # at least one token is possible
    kept = naive(logits, top_k, top_p, temperature, min_p)
    seen = drawn(logits, Sampling(temperature, top_k, top_p, seed=3, min_p=min_p), 400)
    assert set(seen) <= set(kept)
    rare = {token for token, share in kept.items() if share < 0.04}  # these may not come in 400 draws
    assert set(kept) - rare <= set(seen)


def naive(logits: list[float], top_k: int, top_p: float, temperature: float, min_p: float = 0.0) -> dict[int, float]:
    """Return the probability of each token that is kept; of equal tokens the lower number goes first."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    least = max(logits) + temperature * math.log(min_p) - 1e-6 if min_p else -INF
    order = [token for token in order if logits[token] >= least][: top_k or None]
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
    """Rounding in the sums gives no token to a number beyond the last possible token."""
    monkeypatch.setattr("alignedserve.engine.sampling.sampling.uniform", lambda *_: number)
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
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"presence_penalty": math.nan},
        {"frequency_penalty": INF},
        {"min_tokens": -1},
        {"logit_bias": ((3, INF),)},
        {"logit_bias": ((-3, 1.0),)},
        {"logprobs": -1},
        {"prompt_logprobs": -1},
    ],
)
def test_a_sampling_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)


# --- Against transformers


@given(
    seed=st.integers(0, 1000),
    top_k=st.integers(1, 60),
    top_p=st.floats(0.05, 0.99),
    min_p=st.floats(0.01, 0.9),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
)
@settings(deadline=None, max_examples=30)
def test_what_transformers_leaves_out_never_comes_and_the_rest_may(
    seed: int, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(seed)) * 3
    warpers = [
        transformers.MinPLogitsWarper(min_p),
        transformers.TopKLogitsWarper(top_k),
        transformers.TopPLogitsWarper(top_p),
    ]
    warped = logits / temperature
    for warper in warpers:
        warped = warper(torch.zeros(1, 1, dtype=torch.long), warped)
    shares = warped[0].softmax(0)
    seen = drawn(logits[0].tolist(), Sampling(temperature, top_k, top_p, min_p=min_p), 300)
    assert set(seen) <= set(shares.nonzero().flatten().tolist())
    assert {token for token, share in enumerate(shares.tolist()) if share > 0.06} <= set(seen)


# --- Edits of the logits, by what the request has said and by what it may say

VOCABULARY = 40
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=30).map(tuple)
EDITING = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 2.0]),
    top_p=st.sampled_from([0.8, 1.0]),
    seed=st.integers(0, 2**31),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.7, -1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.2]),
    min_tokens=st.integers(0, 25),
    logit_bias=st.lists(st.tuples(st.integers(0, 39), st.floats(-100, 100, width=32)), max_size=4).map(tuple),
    allowed_tokens=st.one_of(st.just(b""), st.lists(st.integers(3, 39), min_size=2, max_size=9).map(pack_tokens)),
    logprobs=st.one_of(st.none(), st.integers(0, 5)),
)
SAID = st.tuples(EDITING, TOKENS, TOKENS)  # sampling, prompt, output
STOPS = (1, 2)


def random_logits(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4


def asked(sampling: Sampling, prompt: tuple[int, ...], output: tuple[int, ...], name: str = "r") -> NextToken:
    return NextToken(sampling, len(output), name, History(prompt, list(output), STOPS))


@given(said=SAID, seed=st.integers(0, 2**32))
@plain
def test_edits_are_the_formulas(said: tuple[Sampling, tuple[int, ...], tuple[int, ...]], seed: int) -> None:
    sampling, prompt, output = said
    logits, history = random_logits(seed), History(prompt, output, STOPS)
    expected = edited_plainly(logits[0].tolist(), sampling, prompt, output)
    edits = Edits(sampling, history, VOCABULARY)
    assert edits.follow(len(output), None)
    edit_logits(logits, [0], [edits], REFERENCE)
    torch.testing.assert_close(logits[0], torch.tensor(expected), rtol=1e-5, atol=1e-5)


def edited_plainly(
    logits: list[float], sampling: Sampling, prompt: tuple[int, ...], output: tuple[int, ...]
) -> list[float]:
    packed, counts = sampling.allowed_tokens, Counter(output)
    allowed = unpack_tokens(packed, VOCABULARY) if packed else [True] * VOCABULARY
    edited = [logit if allowed[token] else -INF for token, logit in enumerate(logits)]
    for token, bias in sampling.logit_bias:
        edited[token] += bias
    for token in {*prompt, *output}:
        edited[token] *= sampling.repetition_penalty ** (-1 if edited[token] > 0 else 1)
    for token, count in counts.items():
        edited[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    if len(output) < sampling.min_tokens:
        for token in STOPS:
            edited[token] = -INF
    return edited


@given(prompt=TOKENS, output=TOKENS, penalty=st.floats(0.5, 2.0), seed=st.integers(0, 2**32))
@plain
def test_repetition_is_as_in_transformers(
    prompt: tuple[int, ...], output: tuple[int, ...], penalty: float, seed: int
) -> None:
    logits = random_logits(seed)
    ids = torch.tensor([[*prompt, *output, 0]])
    expected = transformers.RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    edits = Edits(Sampling(repetition_penalty=penalty, presence_penalty=1e-30), History((*prompt, 0), output, ()), 40)
    assert edits.follow(len(output), None)
    edit_logits(logits, [0], [edits], REFERENCE)
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("penalty", [5e-324, 1e-40, 1e300])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_repetition_penalty_beyond_fp32_leaves_numbers(penalty: float, temperature: float) -> None:
    """The smallest penalty makes the likeliest earlier token certain, the largest keeps an unlikely one away."""
    sampling = Sampling(temperature, repetition_penalty=penalty)
    wanted = NextToken(sampling, 0, "r", History((0, 1, 2), [], ()))
    (chosen,) = Sampler(3).sample(torch.tensor([[0.0, 2.0, -1.0]]), [wanted])
    assert chosen.token in ((1,) if penalty < 1 or not temperature else (0, 1))


@given(rows=st.lists(SAID, min_size=2, max_size=5), seed=st.integers(0, 2**32), order=st.randoms(use_true_random=False))
@plain
def test_with_edits_too_a_token_does_not_depend_on_its_batch(
    rows: list[tuple[Sampling, tuple[int, ...], tuple[int, ...]]], seed: int, order: random.Random
) -> None:
    logits = random_logits(seed, len(rows))
    wanted = [asked(*row, name=str(number)) for number, row in enumerate(rows)]
    single = [
        Sampler(VOCABULARY).sample(logits[number : number + 1].clone(), [wish])[0] for number, wish in enumerate(wanted)
    ]
    places = order.sample(range(len(rows)), len(rows))
    together = Sampler(VOCABULARY).sample(logits[places], [wanted[place] for place in places])
    assert together == [single[place] for place in places]


@given(said=SAID, moved_at=st.sets(st.integers(0, 11)), ahead=st.sets(st.integers(1, 11)), seed=st.integers(0, 99))
@plain
def test_nor_on_being_moved_or_planned_ahead(
    said: tuple[Sampling, tuple[int, ...], tuple[int, ...]], moved_at: set[int], ahead: set[int], seed: int
) -> None:
    """The sampler of another worker has the history as it was sent; a plan made ahead lacks the newest token."""
    sampling, prompt, emitted = said
    logits = random_logits(seed, 40 + 12)

    def run(moved_at: set[int], ahead: set[int]) -> list[int]:
        sampler, output = Sampler(VOCABULARY), list(emitted)
        history = History(prompt, output, STOPS)
        for step in range(12):
            index = len(emitted) + step
            if step in moved_at:
                sampler, output = Sampler(VOCABULARY), list(output)
                history = History(prompt, output, STOPS)
            newest = output[-1] if output else None
            if lacks_newest := step in ahead and newest is not None:
                output.pop()
            wanted = NextToken(sampling, index, "r", history, newest)
            (chosen,) = sampler.sample(logits[index : index + 1].clone(), [wanted])
            assert chosen.token is not None
            if lacks_newest and newest is not None:
                output.append(newest)
            output.append(chosen.token)
        return output

    assert run(moved_at, ahead) == run(set(), set())


def test_a_request_that_left_out_a_step_is_known_again() -> None:
    sampling, history = Sampling(frequency_penalty=100.0), History((), [], STOPS)
    sampler, output = Sampler(VOCABULARY), history.output
    assert isinstance(output, list)
    for index in range(VOCABULARY):
        if index % 3 == 0:
            sampler.sample(random_logits(1), [asked(sampling, (), (), "other")])
        (chosen,) = sampler.sample(random_logits(7), [NextToken(sampling, index, "r", history)])
        assert chosen.token is not None
        output.append(chosen.token)
    assert sorted(output) == list(range(VOCABULARY)), "each token once, whatever its logit"


@pytest.mark.parametrize("are_edited", [False, True])
def test_edits_are_kept_through_pauses_and_steps_that_leave_their_request_out(
    monkeypatch: pytest.MonkeyPatch, are_edited: bool
) -> None:
    """Steps with documents pause four times, and leave documents out four times on end, for chats with edits, too.
    The edits of each document were made again from all of its output."""
    made = list[History]()

    class Noted(Edits):
        def __init__(self, sampling: Sampling, history: History, *others: Any) -> None:
            made.append(history)
            super().__init__(sampling, history, *others)

    monkeypatch.setattr("alignedserve.engine.sampling.sampling.Edits", Noted)
    sampler, output, num_chats = Sampler(VOCABULARY), [5] * 400, 0
    history = History((3,), output, STOPS)

    def sample_for_chats(number: int) -> None:
        nonlocal num_chats
        for _ in range(number):
            num_chats += 1
            sampling = Sampling(repetition_penalty=1.1 if are_edited else 1.0)
            chat = [NextToken(sampling, 0, f"chat {num_chats}", History((), [], STOPS) if are_edited else None)]
            sampler.begin(chat)
            sampler.sample(random_logits(1), chat)

    for num_pauses in (0, 1, 2, 4, 4):
        wanted = [NextToken(Sampling(repetition_penalty=1.1), len(output), "document", history)]
        sampler.begin(wanted)
        sample_for_chats(num_pauses)
        sampler.sample(random_logits(2), wanted)
        output.append(5)
        sample_for_chats(4)
    assert sum(each is history for each in made) == 1


def test_edits_that_find_too_little_memory_half_way_count_no_token_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out at the second new token of a step; the same step goes on later."""
    sampling, output = Sampling(frequency_penalty=0.6), [0]
    sampler, history, logits = Sampler(3), History((), output, ()), torch.tensor([[2.2, 0.9, 0.0]])
    sampler.sample(logits.clone(), [NextToken(sampling, 1, "r", history)])
    output += [0, 2]
    noted, calls = of_edits._Seen.add, 0

    def short(seen: of_edits._Seen, token: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError
        noted(seen, token)

    monkeypatch.setattr(of_edits._Seen, "add", short)
    with pytest.raises(MemoryError):
        sampler.sample(logits.clone(), [NextToken(sampling, 3, "r", history)])
    (chosen,) = sampler.sample(logits.clone(), [NextToken(sampling, 3, "r", history)])
    assert chosen.token == 0, "2.2 - 2 * 0.6 is above 0.9; as a third time it would not be"


def test_the_next_attempt_of_a_name_is_another_request() -> None:
    sampling, sampler = Sampling(frequency_penalty=100.0), Sampler(3)
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    tokens = [
        sampler.sample(logits.clone(), [NextToken(sampling, 1, "r", History((), [said], ()))])[0].token
        for said in (0, 1, 0)
    ]
    assert tokens == [1, 0, 1]


def test_a_choice_is_one_of_its_outputs_and_then_ends() -> None:
    outputs = ((5, 6), (5, 6, 7), (8,))
    sampling, seen = Sampling(5.0, grammar=Choice(outputs)), Counter[tuple[int, ...]]()
    for seed in range(60):
        output: list[int] = []
        history, sampler = History((3,), output, STOPS), Sampler(VOCABULARY)
        while not output or output[-1] not in STOPS:
            wanted = NextToken(replace(sampling, seed=seed), len(output), "r", history)
            (chosen,) = sampler.sample(random_logits(seed), [wanted])
            assert chosen.token is not None
            output.append(chosen.token)
        seen[tuple(output[:-1])] += 1
    assert set(seen) == set(outputs)


@pytest.mark.parametrize("broken", [math.nan, INF, -INF])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(1.0, 3, 0.9, logprobs=2)])
def test_a_row_that_is_broken_breaks_no_other(broken: float, sampling: Sampling) -> None:
    logits = random_logits(1, 3)
    healthy = [
        Sampler(VOCABULARY).sample(logits[row : row + 1].clone(), [NextToken(sampling, row)])[0] for row in range(3)
    ]
    logits[1] = broken
    first, second, third = Sampler(VOCABULARY).sample(logits, [NextToken(sampling, row) for row in range(3)])
    assert (first, third) == (healthy[0], healthy[2])
    assert (second.token, second.logprob) == (None, None)


def test_limits_that_leave_nothing_leave_nothing() -> None:
    sampling = Sampling(min_tokens=5, allowed_tokens=pack_tokens(STOPS))
    (chosen,) = Sampler(VOCABULARY).sample(random_logits(1), [asked(sampling, (3,), ())])
    assert chosen.token is None


def test_lists_of_all_tokens_are_small_and_go_with_their_requests() -> None:
    allowed, number, row = pack_tokens(range(151_936)), 16, 151_936
    sampler, logits = Sampler(row), torch.zeros(number, row)
    wanted = [asked(Sampling(allowed_tokens=allowed), (3,), (), f"r{at}") for at in range(number)]
    tracemalloc.start()
    sampler.sample(logits, wanted)
    during, most = tracemalloc.get_traced_memory()
    for _ in range(_KEPT + 1):  # they may sit out some
        sampler.sample(logits[:1], [NextToken(Sampling(), 0)])
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 * number * row
    assert during - after > 0.9 * number * row


# --- Log-probabilities


@given(seed=st.integers(0, 2**32), top=st.integers(0, VOCABULARY + 3), temperature=st.sampled_from([0.0, 2.0]))
@plain
def test_log_probabilities_are_the_models_own(seed: int, top: int, temperature: float) -> None:
    """The log-probabilities ignore what temperature, penalties and limits make of the logits."""
    logits = random_logits(seed)
    expected = logits[0].log_softmax(0)
    sampling = Sampling(
        temperature, top_k=3, presence_penalty=2.0, allowed_tokens=pack_tokens((4, 5, 6, 7)), logprobs=top
    )
    (chosen,) = Sampler(VOCABULARY).sample(logits, [asked(sampling, (4,), (5, 5))])
    assert chosen.token in (4, 5, 6, 7)
    assert chosen.logprob is not None
    assert chosen.logprob.value == pytest.approx(float(expected[chosen.token]), abs=1e-5)
    best = sorted(range(VOCABULARY), key=lambda token: (-float(expected[token]), token))[:top]
    assert [token for token, _ in chosen.logprob.top] == best
    assert [value for _, value in chosen.logprob.top] == pytest.approx(expected[best].tolist(), abs=1e-5)


def test_of_equal_logits_the_lower_token_is_likelier() -> None:
    flat = torch.zeros(1, 1000)
    (logprob,) = Sampler(flat.shape[1]).score(flat, [999], 3)
    assert [token for token, _ in logprob.top] == [0, 1, 2]
    (chosen,) = Sampler(1000).sample(flat, [NextToken(Sampling(logprobs=1), 0)])
    assert chosen.token == 0, "and it is the greedy one"


def test_only_a_request_that_asks_gets_logprobs() -> None:
    logits = random_logits(3, 3)
    samplings = [Sampling(), Sampling(logprobs=0), Sampling(1.0)]
    chosen = Sampler(VOCABULARY).sample(logits, [NextToken(sampling, 0) for sampling in samplings])
    assert [token.logprob is not None for token in chosen] == [False, True, False]
