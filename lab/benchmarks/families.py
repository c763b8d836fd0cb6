"""Measure modules of our own against transformers' of the same models, both in our engine, with our attention.

    python -m lab.benchmarks.families                                # two families, about a minute
    python -m lab.benchmarks.families --full                         # all families
    python -m lab.benchmarks.families --families mixtral,olmoe --dtype float32

Both engines run each case in turns, for several rounds, and a figure is the median. A family has a module of its own
where that is 1.3 times as fast, which Gemma, Phi and GLM are in decodes; Falcon, Bloom, MPT and Llama 4 have one since
our engine cannot run them by transformers. The exit status is 1 if a goal is missed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from alignedserve.architectures.families.model_config import READERS
from alignedserve.config.config import Dtype
from alignedserve.lab.benchmarks.common.family_models import FAMILIES, make
from alignedserve.lab.benchmarks.common.report import command, report, several, status
from alignedserve.lab.benchmarks.engine import BLOCK, Case, Ours, in_turns

FASTER = 1.3
QUICK = ("mixtral", "qwen3_moe")
CASES = (
    Case("decode 1 x 64", (64,), 32),
    Case("decode 8 x 64", (64,) * 8, 32),
    Case("decode 32 x 64", (64,) * 32, 16),
    Case("prefill 512", (512,), 1),
)


@contextmanager
def without_modules() -> Iterator[None]:
    """Have transformers run models that we have modules for."""
    with patch.dict(READERS, clear=True):
        yield


def compare(family: str, cases: Sequence[Case], rounds: int, dtype: Dtype) -> None:
    with TemporaryDirectory() as scratch:
        folder = make(family, Path(scratch) / family)
        largest = max(sum(-(-(n + case.output) // BLOCK) for n in case.prompts) for case in cases)
        with without_modules():
            theirs = Ours(folder, largest, dtype=dtype)
        engines = {"ours": Ours(folder, largest, dtype=dtype), "transformers": theirs}
        for case in cases:
            took = in_turns(engines, case, rounds)
            tokens = sum(case.prompts) if case.is_prefill else len(case.prompts)
            rate = tokens / took["transformers"]
            name = f"{family}, {case.name}, {dtype.value}, our module against transformers'"
            report(name, tokens / took["ours"], "tokens/s", baseline=rate, goal=FASTER * rate, at_least=True)


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--full", action="store_true", help="all families")
    parser.add_argument("--families", type=several(str, FAMILIES), default=list(QUICK), help="these families")
    parser.add_argument("--only", default="", help="cases whose name has one of these texts (separated by commas)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each case on each engine")
    kinds = [kind for kind in Dtype if kind is not Dtype.AUTO]
    parser.add_argument("--dtype", type=Dtype, choices=kinds, default=Dtype.BFLOAT16, help="what both compute in")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be 1 or more")
    cases = [case for case in CASES if any(name in case.name for name in args.only.split(","))]
    if not cases:
        parser.error(f"--only {args.only} leaves no case of {', '.join(case.name for case in CASES)}")
    for family in FAMILIES if args.full else args.families:
        compare(family, cases, args.rounds, args.dtype)
    sys.exit(status())


if __name__ == "__main__":
    main()
