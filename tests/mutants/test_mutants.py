"""The mutants that were written by hand fit the present source. Whether they are found is tried by `make mutants`."""

from __future__ import annotations

from collections import Counter

from tests.mutants import MUTANTS
from tests.mutants.mutant import Mutant
from tests.mutants.results import read


def _fits(mutant: Mutant) -> bool:
    try:
        mutant.plant()
    except ValueError:
        return False
    return mutant.old != mutant.new


def test_the_code_of_each_occurs_once() -> None:
    assert [mutant.name for mutant in sorted(MUTANTS, key=lambda mutant: mutant.file) if not _fits(mutant)] == []


def test_names_differ() -> None:
    assert max(Counter(mutant.name for mutant in MUTANTS).values()) == 1


def test_the_table_has_every_mutant_and_none_survives() -> None:
    found = read()
    assert found.keys() == {mutant.name for mutant in MUTANTS}
    assert not [mutant.name for mutant in MUTANTS if not (found[mutant.name].is_killed or mutant.is_the_same)]
