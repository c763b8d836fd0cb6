"""Plant mutants, and say which the tests find: `python -m tests.mutants`, `python -m tests.mutants --sample 600`.

Without --sample those that were written by hand: the unit tests near the mutated file run up to the first that fails. A
mutant that no unit test kills gets --seeds seeds of the fuzzer, every other one --seeds-besides. The exit status is 1
if one survives. With --sample mutants are drawn at random from all folders, and the status is 1 if the score is lower
than the published one by more than a point.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from itertools import groupby

from tests.mutants import MUTANTS, compiled, results, score
from tests.mutants.drawing import LEAST, draw, files_by_folder, lines_of, part_of, shares
from tests.mutants.equivalents import EQUIVALENT
from tests.mutants.first_failure import failing_seed
from tests.mutants.mutant import Mutant
from tests.mutants.results import Finding
from tests.mutants.trying import SURVIVED, Tried, tried


def main() -> int:
    options = _parser().parse_args()
    if options.compiled is not None:
        return _compiled(options)
    return _sample(options) if options.sample is not None else _written_by_hand(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument(
        "--only",
        nargs="*",
        default=[],
        metavar="NAME",
        help="these folders, in this order, or what has this in its name",
    )
    parser.add_argument("--write", action="store_true", help="bring results.md, or score.md, up to date")
    drawn = parser.add_argument_group("drawn at random")
    drawn.add_argument("--sample", type=int, metavar="NUMBER", help="how many, over all folders")
    drawn.add_argument("--least", type=int, default=LEAST, metavar="NUMBER", help="how many of each folder, at least")
    drawn.add_argument("--seed", type=int, help="of the draw; that of the published score where it is not given")
    drawn.add_argument("--compiled", type=int, metavar="NUMBER", help="how many of the C++ kernels, instead")
    drawn.add_argument("--more", action="store_true", help="only those that follow the published ones in the draw")
    drawn.add_argument("--again", action="store_true", help="only those that survived when the score was published")
    by_hand = parser.add_argument_group("written by hand")
    by_hand.add_argument("--seeds", type=int, default=5000, help="most seeds for a mutant that no unit test kills")
    by_hand.add_argument("--seeds-besides", type=int, default=50, metavar="SEEDS", help="most seeds for every other")
    by_hand.add_argument("--start", type=int, default=0, metavar="SEED", help="first seed")
    by_hand.add_argument("--without-tests", action="store_true", help="run the fuzzer only")
    return parser


def _sample(options: argparse.Namespace) -> int:
    published = score.read()
    seed = published.seed if options.seed is None else options.seed
    print(f"seed {seed}", file=sys.stderr)
    order = {folder: place for place, folder in enumerate(options.only)}
    folders = dict(sorted(files_by_folder().items(), key=lambda entry: order.get(entry[0], len(order))))
    lines = {folder: lines_of(files) for folder, files in folders.items()}
    numbers = shares(lines, options.sample, options.least)
    now = score.Score({}, {}, seed)
    written = published if published.seed == seed else now
    drawn = {}
    for folder, files in folders.items():
        before = published.rows.get(folder)
        is_wanted = any(part == folder if part in folders else part in folder for part in options.only)
        if is_wanted or not options.only:
            mutants = published.tried_again(files) if options.again else []
            if not options.again or options.more:
                known = before.mutants if options.more and before else 0
                new = draw(files, numbers[folder], seed)[known:]
                mutants += [mutant for mutant in new if not (known and published.has_survived(mutant))]
            if mutants or not (before or options.again):
                drawn[folder] = mutants
    # Folders that are named are tried together, and otherwise those of one part of the product: they share tests.
    for _, together in groupby(drawn, lambda folder: "" if options.only else part_of(folder)):
        some = {folder: drawn[folder] for folder in together}
        found = {mutant: Tried(SURVIVED) for mutants in some.values() for mutant in mutants}
        found |= tried([mutant for mutant in found if mutant.name not in EQUIVALENT], _say)
        for folder, mutants in some.items():
            row, survivors = score.row_of(folder, lines[folder], {mutant: found[mutant] for mutant in mutants})
            if options.again or options.more:
                row, survivors = published.after(row, survivors, {mutant.name for mutant in mutants})
            now = now.with_folder(row, survivors)
            written = written.with_folder(row, survivors)
            _say(str(row))
        if options.write:
            score.write(written)
    print(score.text(now))
    fell = score.falls(published, now)
    print("\n".join(fell), file=sys.stderr)
    return int(bool(fell))


def _compiled(options: argparse.Namespace) -> int:
    """Try mutants of the C++ kernels until so many compile to other code."""
    published = score.read()
    found: dict[compiled.TextMutant, Tried] = {}
    drawn = compiled.draw(published.seed if options.seed is None else options.seed)
    for mutant, each in compiled.tried(drawn, _say):
        found[mutant] = each
        if len(found) == options.compiled:
            break
    now = score.Score({}, {}, published.seed).with_folder(*compiled.row_of(found))
    if options.write:
        score.write(published.with_folder(*compiled.row_of(found)))
    print(score.text(now))
    return int(bool(score.falls(published, now)))


def _written_by_hand(options: argparse.Namespace) -> int:
    chosen = [mutant for mutant in MUTANTS if not options.only or any(part in mutant.name for part in options.only)]
    findings: dict[str, Finding] = {}
    for mutant, finding in _findings(chosen, options):
        findings[mutant.name] = finding
        _say(f"{mutant.name}: {finding.test or '-'}; {finding.seed or '-'}")
        if options.write:
            results.write(MUTANTS, results.read() | findings)
    print(results.table(MUTANTS, findings))
    return int(any(not findings[mutant.name].is_killed and not mutant.is_the_same for mutant in chosen))


def _findings(mutants: list[Mutant], options: argparse.Namespace) -> Iterator[tuple[Mutant, Finding]]:
    commit, by_name = results.commit(), {mutant.name: mutant for mutant in mutants}
    planted = [mutant.plant() for mutant in mutants]
    for plant, found in ((plant, Tried("")) for plant in planted) if options.without_tests else tried(planted, _say):
        mutant = by_name[plant.name]
        num_seeds = options.seeds_besides if found.is_found or mutant.is_the_same else options.seeds
        seed = failing_seed(plant, range(options.start, options.start + num_seeds))
        yield mutant, Finding(found.test, seed, num_seeds, commit)


def _say(line: str) -> None:
    os.write(_STDERR, f"{line}\n".encode())


_STDERR = os.dup(2)  # forks drop their output, and yet say how far they are

if __name__ == "__main__":
    sys.exit(main())
