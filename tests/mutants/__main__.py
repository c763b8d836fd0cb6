"""Plant each mutant in a copy of the repository, and say what kills it: `python -m tests.mutants`.

The unit tests near the mutated file are run first, up to the first that fails. A mutant that no unit test kills gets
--seeds seeds of the fuzzer, every other one --seeds-besides. The exit status is 1 if a mutant survives.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import chain

from tests.mutants import MUTANTS, results
from tests.mutants.mutant import Mutant
from tests.mutants.nearest import nearest_first
from tests.mutants.results import Finding
from tests.mutants.workshop import Workshop, workshop


def main() -> int:
    options = _parser().parse_args()
    chosen = [mutant for mutant in MUTANTS if not options.only or any(part in mutant.name for part in options.only)]
    findings: dict[str, Finding] = {}
    for mutant, finding in _findings(chosen, options):
        findings[mutant.name] = finding
        print(f"{mutant.name}: {finding.test or '-'}; {finding.seed or '-'}", file=sys.stderr, flush=True)
        if options.write:
            results.write(MUTANTS, results.read() | findings)
    print(results.table(MUTANTS, findings))
    return int(any(not findings[mutant.name].is_killed and not mutant.is_the_same for mutant in chosen))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="mutants with this in their names")
    parser.add_argument("--seeds", type=int, default=5000, help="most seeds for a mutant that no unit test kills")
    parser.add_argument("--seeds-besides", type=int, default=50, metavar="SEEDS", help="most seeds for every other")
    parser.add_argument("--start", type=int, default=0, metavar="SEED", help="first seed")
    parser.add_argument("--without-tests", action="store_true", help="run the fuzzer only")
    parser.add_argument("--write", action="store_true", help="bring the table in tests/mutants/results.md up to date")
    return parser


def _findings(mutants: list[Mutant], options: argparse.Namespace) -> Iterator[tuple[Mutant, Finding]]:
    known, commit = results.read(), results.commit()
    with workshop() as shop:
        if not options.without_tests:
            shop.check(chain.from_iterable(next(nearest_first(mutant)) for mutant in mutants))
        for mutant in mutants:
            yield mutant, _finding(shop, mutant, options, known.get(mutant.name), commit)


def _finding(
    shop: Workshop, mutant: Mutant, options: argparse.Namespace, known: Finding | None, commit: str
) -> Finding:
    test = "" if options.without_tests else shop.failing_test(mutant, known.test if known else "")
    num_seeds = options.seeds_besides if test or mutant.is_the_same else options.seeds
    seed = shop.failing_seed(mutant, range(options.start, options.start + num_seeds))
    return Finding(test, seed, num_seeds, commit)


if __name__ == "__main__":
    sys.exit(main())
