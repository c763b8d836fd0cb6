"""Tests that the Triton kernels, in their interpreter, draw what torch draws, for each row by itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

from alignedserve.core import History, Sampling
from alignedserve.engine.sampling.sampling import NextToken, Sampler
from alignedserve.kernels.common import drawing
from alignedserve.kernels.common.drawing import NONE, Likeliest
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.triton import sampling
from alignedserve.kernels.triton.kernels import TritonKernels
from alignedserve.kernels.triton.launch import interpreting
from alignedserve.text.token_sets import pack_tokens
from tests.conftest import SOAK
from tests.kernels.samples import threads
from tests.rare import rare

KERNELS = TritonKernels()
INF = math.inf

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy warns of infinities
    pytest.mark.skipif(not interpreting(), reason="Triton compiles here: tests/gpu tries these kernels on the GPU"),
]
few = settings(
    deadline=None, max_examples=300 if SOAK else 3, suppress_health_check=[HealthCheck.too_slow], print_blob=False
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with threads(1):
        yield


WISHES = st.builds(
    Sampling,
    temperature=st.one_of(st.sampled_from([0.0, 1.0, 1e-30, 1e38]), st.floats(1e-6, 50.0)),
    top_k=st.one_of(st.sampled_from([0, 1]), st.integers(2, 60)),
    top_p=st.one_of(st.just(1.0), st.floats(1e-6, 1.0, exclude_max=True)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
)
NUMBERS = st.floats(0.0, 1.0, exclude_max=True)


@st.composite
def rows(draw: st.DrawFn) -> torch.Tensor:
    """Draw peaked and flat rows, with many equal logits, impossible tokens, and one that lies far below all others."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    columns = draw(st.sampled_from([1, 2, 7, 128, 300]))
    row = torch.randn(columns, generator=generator) * draw(st.sampled_from([0.0, 0.3, 2.0, 12.0]))
    row = row.bfloat16().float() if draw(st.booleans()) else row
    row[-1] = draw(st.sampled_from([row[-1].item(), -1e4, -3e38]))
    row[torch.rand(columns, generator=generator) < draw(st.sampled_from([0.0, 0.0, 0.5, 1.0]))] = -INF
    row[0] = 0.25  # at least one token is possible
    return row


def by_torch(row: torch.Tensor, wish: Sampling, number: float) -> set[int]:
    """Return the tokens that torch draws with this number and this top-p, or with values within the rounding of
    fp32."""
    off = 4e-6
    wishes = (
        [replace(wish, top_p=min(1.0, wish.top_p * by)) for by in (1 - off, 1, 1 + off)] if wish.top_p < 1 else [wish]
    )
    near = [min(max(number + by, 0.0), 1 - 2**-53) for by in (-off, 0.0, off)]
    both = [(near_wish, near_number) for near_wish in wishes for near_number in near]
    tokens = drawing.draw(
        row.repeat(len(both), 1), [near_wish for near_wish, _ in both], [near_number for _, near_number in both]
    )
    return set(tokens.tolist())


@given(row=rows(), wishes=st.lists(st.tuples(WISHES, NUMBERS), min_size=1, max_size=4), many_parts=st.booleans())
@few
def test_each_way_of_drawing_draws_what_torch_draws(
    row: torch.Tensor, wishes: list[tuple[Sampling, float]], many_parts: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if many_parts:  # and a list with room for few, so that rows are searched too
            for name, size in (("_PART", 16), ("_BOUNDS", 4), ("_LISTED", 4)):
                patch.setattr(sampling, name, size)
        got = KERNELS.draw(row.repeat(len(wishes), 1), [wish for wish, _ in wishes], [number for _, number in wishes])
    for token, (wish, number) in zip(got.tolist(), wishes, strict=True):
        assert token in by_torch(row, wish, number), (wish, number)


@pytest.mark.parametrize("columns", [9_000, pytest.param(151_936, marks=rare)])
def test_usual_logits_are_drawn_from_alike(columns: int) -> None:
    """The vocabulary spans several parts; here torch and Triton agree without exception."""
    generator = torch.Generator().manual_seed(1)
    wishes = [
        Sampling(1.0),
        Sampling(0.7, top_p=0.95),
        Sampling(1.0, top_k=50),
        Sampling(1.3, 40, 0.9, min_p=0.02),
        Sampling(0.8, min_p=0.05),
    ]
    numbers = torch.rand(len(wishes), generator=generator, dtype=torch.double).tolist()
    logits = 3 * torch.randn(len(wishes), columns, generator=generator)
    logits[4, : columns // 2] = -INF
    assert KERNELS.draw(logits.clone(), wishes, numbers).tolist() == drawing.draw(logits, wishes, numbers).tolist()


@pytest.mark.parametrize("kernels", [KERNELS, Reference()], ids=["triton", "torch"])
def test_a_table_draws_what_its_wishes_draw(kernels: Reference) -> None:
    """Greedy rows keep their logits, from which a sampler may draw."""
    wishes = [Sampling(), Sampling(0.7, top_p=0.95), Sampling(), Sampling(1e-40, top_k=5_000), Sampling(1e39)]
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(1))
    numbers, out = [0.0, 0.3, 0.0, 0.5, 0.9013], torch.zeros(5, dtype=torch.long)
    given_logits = logits.clone()
    kernels.draw_by(logits, drawing.table_of(wishes, numbers, 300), out)
    assert out.tolist() == drawing.draw(given_logits.clone(), wishes, numbers).tolist()
    assert logits[::2][:2].equal(given_logits[::2][:2])
    kernels.draw_by(given_logits, drawing.table_of([Sampling()] * 5, numbers, 300), out)
    assert out.tolist() == given_logits.argmax(1).tolist()


def test_of_equal_tokens_the_number_tells_which() -> None:
    logits = torch.zeros(3, 10)
    numbers = [0.05, 0.35, 1 - 2**-53]
    assert KERNELS.draw(logits, [Sampling(1.0)] * 3, numbers).tolist() == [0, 3, 9]
    assert KERNELS.draw(logits, [Sampling(1.0, top_k=4)] * 3, numbers).tolist() == [0, 1, 3]
    assert KERNELS.draw(logits[1:], [Sampling(1.0, top_k=2**40)] * 2, numbers[1:]).tolist() == [3, 9]
    assert KERNELS.draw(logits, [Sampling(1.0, top_p=0.45)] * 3, numbers).tolist() == [0, 1, 4]


def test_equal_logits_and_a_single_token_are_searched() -> None:
    """All tokens lie at one key: more than the list has room for, or but one."""
    equal = torch.full((2, 20_000), 7.3)
    equal[1, torch.arange(20_000) != 12_345] = -INF
    for wish, last in ((Sampling(1.0, top_p=0.5), 9_999), (Sampling(1.0, top_k=300), 299)):
        assert KERNELS.draw(equal, [wish] * 2, [1 - 2**-53] * 2).tolist() == [last, 12_345]


def test_what_cannot_be_is_not_drawn() -> None:
    nan, possible = torch.tensor([0.0, math.nan, 1.0]), torch.tensor([-INF, -INF, 0.0])
    logits = torch.stack([nan, torch.full((3,), -INF), torch.tensor([INF, 0.0, 0.0]), possible, possible])
    for wish in (Sampling(), Sampling(1e38), Sampling(1e-30, top_k=2), Sampling(1.0, top_p=0.9)):
        drawn = KERNELS.draw(logits.clone(), [wish] * 5, [0.0, 0.5, 0.5, 0.0, 1 - 2**-53])
        assert drawn.tolist() == [*[NONE] * 3, 2, 2]


@pytest.mark.parametrize("columns", [1, 31, 32, 5000])
def test_tokens_that_masks_do_not_allow_are_impossible(columns: int) -> None:
    logits, masks = torch.randn(4, columns), [torch.rand(columns) < share for share in (0.5, 0.0, 1.0)]
    expected = logits.clone()
    Reference().allow(expected, [3, 0, 2], masks)
    KERNELS.allow(logits, [3, 0, 2], masks)
    assert logits.equal(expected)
    assert (logits[0] == -INF).all(), "nothing is allowed"


@given(row=rows(), rows_beside=st.lists(rows(), min_size=1, max_size=1), wish=WISHES, number=NUMBERS)
@few
def test_a_token_does_not_depend_on_its_batch(
    row: torch.Tensor, rows_beside: list[torch.Tensor], wish: Sampling, number: float
) -> None:
    alone = KERNELS.draw(row[None], [wish], [number])
    beside = [torch.nn.functional.pad(row_beside, (0, len(row)), value=-INF)[: len(row)] for row_beside in rows_beside]
    together = torch.stack([*beside, row])
    assert KERNELS.draw(together, [wish] * len(together), [number] * len(together))[-1:].tolist() == alone.tolist()


@given(
    columns=st.sampled_from([1, 5, 200]),
    seed=st.integers(0, 2**32),
    tops=st.lists(st.integers(0, 8), min_size=1, max_size=3),
)
@few
def test_log_probabilities_are_those_of_torch(columns: int, seed: int, tops: list[int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(tops), columns, generator=generator).bfloat16().float()  # many logits are equal
    logits[:, columns // 2 + 1 :] = -INF
    tokens = torch.randint(0, columns // 2 + 1, (len(tops),), generator=generator)
    got, expected = KERNELS.logprobs(logits, tokens, tops), Reference().logprobs(logits, tokens, tops)
    assert got.counts.tolist() == expected.counts.tolist()
    torch.testing.assert_close(got.of_token, expected.of_token, rtol=1e-5, atol=1e-5)
    for row, count in enumerate(got.counts.tolist()):
        assert got.tokens[row, :count].tolist() == expected.tokens[row, :count].tolist()
        torch.testing.assert_close(got.values[row, :count], expected.values[row, :count], rtol=1e-5, atol=1e-5)


VOCABULARY = 64
ASKED = [
    Sampling(),
    Sampling(logprobs=0),
    Sampling(0.8, seed=3, logprobs=4, logit_bias=((3, 4.0), (9, -2.0))),
    Sampling(0.8, top_k=12, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, seed=5),
    Sampling(1.2, top_p=0.8, seed=6, min_tokens=9, allowed_tokens=pack_tokens(range(2, 40))),
]


def wanted() -> list[NextToken]:
    history = History(prompt=(1, 2, 3, 3, 7), output=[4, 5], stop_tokens=(2, 3))
    return [NextToken(sampling, 3, f"r{row}", history, 11) for row, sampling in enumerate(ASKED)]


def test_a_sampler_on_these_kernels_says_what_a_sampler_on_torch_says() -> None:
    logits = torch.randn(len(ASKED), VOCABULARY, generator=torch.Generator().manual_seed(0))
    got = Sampler(VOCABULARY, kernels=KERNELS).sample(logits.clone(), wanted())
    expected = Sampler(VOCABULARY).sample(logits, wanted())
    assert [token.token for token in got] == [token.token for token in expected]
    for drawn, reference in zip(got, expected, strict=True):
        assert (drawn.logprob is None) == (reference.logprob is None)
        if drawn.logprob is not None and reference.logprob is not None:
            assert drawn.logprob.value == pytest.approx(reference.logprob.value, abs=1e-5)
            assert [token for token, _ in drawn.logprob.top] == [token for token, _ in reference.logprob.top]


class _Elsewhere(Reference):
    """Kernels for a device from which nothing can be read."""

    def draw(self, logits: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        assert logits.is_meta
        return torch.empty(len(logits), dtype=torch.long, device=logits.device)

    def logprobs(self, logits: torch.Tensor, *_: object, **__: object) -> Likeliest:
        assert logits.is_meta
        return Likeliest(*torch.empty(4, len(logits), 1, device=logits.device))


def test_nothing_is_read_from_the_device_before_the_tokens() -> None:
    """On torch's meta device there are no numbers: code that reads a number would raise."""
    drawn = Sampler(VOCABULARY, kernels=_Elsewhere()).draw(torch.empty(len(ASKED), VOCABULARY, device="meta"), wanted())
    assert drawn.tokens.is_meta
    assert drawn.asked == [1, 2]
    with pytest.raises((RuntimeError, NotImplementedError)):
        drawn.read()
