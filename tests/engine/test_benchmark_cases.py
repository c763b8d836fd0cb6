"""Tests that the cases of benchmarks.engine fit the models on which they run."""

from __future__ import annotations

import pytest

from benchmarks.common.models import POSITIONS
from benchmarks.engine import cases


@pytest.mark.parametrize("model", POSITIONS)
def test_every_case_fits_or_is_cut_and_says_so(model: str) -> None:
    for case in cases(full=True):
        fitting = case.within(POSITIONS[model])
        assert fitting.longest <= POSITIONS[model]
        assert len(fitting.prompts) == len(case.prompts)
        assert (fitting == case) == (case.longest <= POSITIONS[model])
        assert fitting == case or fitting.name == f"{case.name} cut to {max(fitting.prompts)}"
