"""The mutants fit the present source. Whether they are found is tried by `make mutants`."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.mutants import MUTANTS
from tests.mutants.mutant import SOURCE, Mutant
from tests.mutants.results import read
from tests.mutants.workshop import failed_tests


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_its_text_occurs_once_and_what_it_makes_of_it_compiles(mutant: Mutant) -> None:
    compile(mutant.plant(), mutant.file, "exec")
    assert (SOURCE / mutant.tests).is_dir()
    assert mutant.old != mutant.new


def test_names_differ() -> None:
    assert max(Counter(mutant.name for mutant in MUTANTS).values()) == 1


def test_the_table_has_every_mutant_and_none_survives() -> None:
    found = read()
    assert found.keys() == {mutant.name for mutant in MUTANTS}
    assert not [mutant.name for mutant in MUTANTS if not (found[mutant.name].is_killed or mutant.is_the_same)]


def test_a_line_of_a_log_is_no_test_that_failed() -> None:
    printed = "ERROR    alignedserve.jobs:actor.py:336 away\nFAILED tests/jobs/test_a.py::test_b[1] - assert 1 == 2\n"
    assert failed_tests(printed + "ERROR tests/jobs/test_c.py\n") == [
        "tests/jobs/test_a.py::test_b[1]",
        "tests/jobs/test_c.py",
    ]
