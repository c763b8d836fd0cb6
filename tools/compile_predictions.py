"""Compile measured predictions of output lengths into the simulator's tables (loads/workload/predictions.json).

    python tools/compile_predictions.py --lengths ../shared/traces/lengths

Sources: the class that a trained BERT predicted of 20,000 answers to LMSYS prompts (SSJF, Apache-2.0), and the tokens
that a regression predicted of 20,000 ShareGPT answers (vidur_opt_scheduler, MIT). A table keeps, for ten ranges of true
lengths, how often each prediction was made. It prints how near predictions drawn from a table are to the measured ones.
"""

from __future__ import annotations

import argparse
import csv
import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from alignedserve.loads.workload.predictions import TABLES, Predictions, prediction_table

RANGES = 10  # of true lengths, with as many outputs each; and of predicted ones
COVERED = 0.9  # share of outputs that are no longer than the upper estimate
PAIRS = 200_000
ABOUT = {
    Predictions.LMSYS: (
        "ssjf_lmsys_multiclass.csv",
        "predicted_class",
        "BERT classifier, LMSYS-Chat-1M, vicuna-13b; James-QiuHaoran/LLM-serving-with-proxy-models, Apache-2.0",
    ),
    Predictions.SHAREGPT: (
        "sharegpt_val_predicted.csv",
        "predicted_output_tokens",
        "regression, ShareGPT; AKafakA/vidur_opt_scheduler, MIT",
    ),
}

Pair = tuple[int, int]  # what was predicted, and the true length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, required=True, help="folder of the sources")
    folder = parser.parse_args().lengths
    measured = {source: read(folder / name, column) for source, (name, column, _) in ABOUT.items()}
    tables = {source.value: compiled(pairs, ABOUT[source][2]) for source, pairs in measured.items()}
    TABLES.write_text(json.dumps(tables, indent=1).replace("\n   ", "").replace("\n  ]", "]") + "\n", encoding="utf-8")
    for source, pairs in measured.items():
        print(source.value, "measured", *figures(said_of(pairs)))
        print(source.value, "drawn   ", *figures(drawn(source, [true for _, true in pairs])))


def read(path: Path, column: str) -> list[Pair]:
    with path.open(encoding="utf-8", newline="") as file:
        pairs = [(int(float(row[column])), int(row["output_tokens"])) for row in csv.DictReader(file)]
    return [(said, true) for said, true in pairs if true]


def compiled(pairs: Sequence[Pair], about: str) -> dict[str, Any]:
    edges, levels = edges_of([true for _, true in pairs]), level_of(pairs)
    true_of = defaultdict[int, list[int]](list)
    counts = [Counter[int]() for _ in range(len(edges) + 1)]
    for said, true in pairs:
        true_of[levels(said)].append(true)
        counts[bisect_right(edges, true)][levels(said)] += 1
    known = sorted(true_of)
    estimates = [[round(fmean(true_of[level])), upper(true_of[level])] for level in known]
    return {
        "about": about,
        "edges": edges,
        "said": estimates,
        "often": [[row[level] for level in known] for row in counts],
    }


def edges_of(values: Sequence[int]) -> list[int]:
    in_order = sorted(values)
    return sorted({in_order[len(in_order) * at // RANGES] for at in range(1, RANGES)} - {in_order[0]})


def level_of(pairs: Sequence[Pair]) -> Callable[[int], int]:
    """Return a function from a prediction to its number: predictions that are classes stay what they are."""
    said = {said for said, _ in pairs}
    if len(said) <= RANGES:
        return lambda value: value
    edges = edges_of([said for said, _ in pairs])
    return lambda value: bisect_right(edges, value)


def upper(lengths: Sequence[int]) -> int:
    return sorted(lengths)[int(COVERED * len(lengths))]


def said_of(pairs: Sequence[Pair]) -> list[tuple[float, float, int]]:
    """Return mean, upper estimate and true length of each, as the table says them."""
    levels = level_of(pairs)
    true_of = defaultdict[int, list[int]](list)
    for said, true in pairs:
        true_of[levels(said)].append(true)
    means, uppers = ({level: f(lengths) for level, lengths in true_of.items()} for f in (fmean, upper))
    return [(means[levels(said)], uppers[levels(said)], true) for said, true in pairs]


def drawn(source: Predictions, lengths: Sequence[int]) -> list[tuple[float, float, int]]:
    draw, table = Random("drawn"), prediction_table(source)
    estimates = [table.draw(length, draw) for length in lengths]
    return [(said.mean, said.upper, length) for said, length in zip(estimates, lengths, strict=True)]


def figures(found: Sequence[tuple[float, float, int]]) -> tuple[str, ...]:
    draw, in_order = Random("pairs"), list[float]()
    for _ in range(PAIRS):
        (a, _, x), (b, _, y) = draw.choice(found), draw.choice(found)
        if x != y:
            in_order.append(0.5 if a == b else float((a > b) == (x > y)))
    off, covered = fmean(abs(mean - true) for mean, _, true in found), fmean(true <= most for _, most, true in found)
    return f"MAE {off:.1f}", f"pairs in order {fmean(in_order):.3f}", f"covered {covered:.3f}"


if __name__ == "__main__":
    main()
