"""The mutants fit the present source. Whether they are found is tried by `make mutants`."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.mutants import MUTANTS
from tests.mutants.mutant import SOURCE, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_its_text_occurs_once_and_what_it_makes_of_it_compiles(mutant: Mutant) -> None:
    compile(mutant.plant(), mutant.file, "exec")
    assert (SOURCE / mutant.tests).is_dir()
    assert mutant.old != mutant.new


def test_names_differ() -> None:
    assert max(Counter(mutant.name for mutant in MUTANTS).values()) == 1
