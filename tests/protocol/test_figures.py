"""The bounds of histograms that parts count into."""

from __future__ import annotations

from itertools import pairwise

import pytest

from alignedserve.protocol.figures import SPREADS, STEP_TOKENS


@pytest.mark.parametrize(("bounds", "factor"), [(SPREADS, 4), (STEP_TOKENS[1:], 2)])
def test_each_bound_is_as_many_times_the_one_before_it(bounds: tuple[int, ...], factor: int) -> None:
    """Otherwise a bar in a dashboard would be narrower than its neighbours, and look lower."""
    assert [after / before for before, after in pairwise(bounds)] == [factor] * (len(bounds) - 1)
