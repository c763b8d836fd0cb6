"""Plant each mutant in a copy of the repository, and say what finds it: `python -m tests.mutants`.

It exits with 1 if a mutant is found neither by the fuzzer nor by the unit tests of its folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from tests.mutants import MUTANTS
from tests.mutants.mutant import Mutant
from tests.mutants.workshop import Finding, table, workshop


def main() -> int:
    options = _parser().parse_args()
    chosen = [mutant for mutant in MUTANTS if not options.only or any(part in mutant.name for part in options.only)]
    seeds = range(options.start, options.start + options.seeds)
    findings = list(_findings(chosen, seeds, not options.without_tests))
    print(table(findings))
    return int(any(not found.is_found and not found.mutant.is_the_same for found in findings))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="mutants with this in their names")
    parser.add_argument("--seeds", type=int, default=5000, help="most seeds for a mutant; the first that fails ends it")
    parser.add_argument("--start", type=int, default=0, metavar="SEED", help="first seed")
    parser.add_argument("--without-tests", action="store_true", help="run the fuzzer only")
    return parser


def _findings(mutants: list[Mutant], seeds: range, runs_tests: bool) -> Iterator[Finding]:
    with workshop() as shop:
        for mutant in mutants:
            found = shop.look(mutant, seeds, runs_tests)
            print(f"{mutant.name}: {found.seed or '-'}; {found.test or '-'}", file=sys.stderr, flush=True)
            yield found


if __name__ == "__main__":
    sys.exit(main())
