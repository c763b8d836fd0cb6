"""The comparison with the reference catches wrong tokens, and excuses a tie only."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.reference import Tally, compare


class Scripted:
    """Reference model whose logits after each token are given: row i belongs to position i."""

    def __init__(self, *rows: list[float]) -> None:
        self.rows = torch.tensor(rows)
        self.read: list[int] = []

    def __call__(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        self.read = input_ids[0].tolist()
        return SimpleNamespace(logits=self.rows[None, : len(self.read)])


UNUSED = [9.0, 0.0, 0.0]
FIRST, LAST = [1.0, 0.0, -2.0], [0.0, 0.0, 1.0]


def test_what_is_right_passes_and_is_counted() -> None:
    model, tally = Scripted(UNUSED, FIRST, LAST, UNUSED), Tally()
    compare(model, [5, 6], [0, 2], tally)
    assert model.read == [5, 6, 0], "the last token of the output is not read: nothing follows it"
    assert (tally.compared, tally.excused) == (2, [])
    tally.check()


@pytest.mark.parametrize("output", [[1, 2], [0, 0], [0, 99], [-1, 2]])
def test_a_wrong_token_is_caught_wherever_it_is(output: list[int]) -> None:
    with pytest.raises(AssertionError, match="the reference has"):
        compare(Scripted(UNUSED, FIRST, LAST), [5, 6], output, Tally())


def test_a_tie_is_excused_printed_and_the_comparison_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    tie = [1.0, 1.0 - 1e-4, -2.0]  # within 1e-4 of the largest absolute logit, which is 2
    tally = Tally()
    compare(Scripted(tie, LAST), [5], [1, 2], tally, "a tie")
    assert "excused: a tie: token 0 after 1 of prompt is 1, the reference has 0" in capsys.readouterr().out
    assert (tally.compared, len(tally.excused)) == (2, 1)
    with pytest.raises(AssertionError, match="token 1 "):
        compare(Scripted(tie, LAST), [5], [1, 0], tally)


def test_a_third_token_is_not_excused_by_a_tie_of_two_others() -> None:
    with pytest.raises(AssertionError, match="is 2, the reference has"):
        compare(Scripted([1.0, 1.0, -2.0]), [5], [2], Tally())


def test_a_gap_that_is_just_too_wide_is_not_excused() -> None:
    with pytest.raises(AssertionError, match="apart"):
        compare(Scripted([1.0, 1.0 - 3e-4, -2.0]), [5], [1], Tally())


def test_any_of_several_equal_best_is_excused() -> None:
    for served in (0, 1, 2):
        compare(Scripted([1.0, 1.0, 1.0, -2.0]), [5], [served], Tally())


@pytest.mark.parametrize(
    ("compared", "excused", "passes"),
    [(3, 1, True), (3, 2, False), (9_999, 2, False), (10_000, 2, True), (10_000, 3, False), (0, 0, True)],
)
def test_a_difference_in_five_thousand_is_allowed_and_a_single_difference_always(
    compared: int, excused: int, passes: bool
) -> None:
    tally = Tally(compared, ["an excuse"] * excused)
    if passes:
        tally.check()
    else:
        with pytest.raises(AssertionError, match="an excuse"):
            tally.check()


def test_a_reference_that_is_not_fp32_or_not_finite_is_no_reference() -> None:
    half = Scripted(FIRST)
    half.rows = half.rows.half()
    with pytest.raises(AssertionError, match="fp32"):
        compare(half, [5], [0], Tally())
    with pytest.raises(AssertionError, match="finite"):
        compare(Scripted([1.0, float("nan"), 0.0]), [5], [0], Tally())
