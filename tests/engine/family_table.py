"""The table of families: a tiny random model of each is tried with each feature of the engine.

    python -m tests.engine.family_table             # tries all, and writes families.md here: some minutes
    python -m tests.engine.family_table qwen3 phi3  # tries these alone, and prints their rows

A feature works for a family if greedy output equals that of transformers, whose weights, or K and V, are rounded as
the feature rounds them. A feature that the engine refuses for a family is a "no" in the table.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

from alignedserve.architectures.families.generic import GenericConfig
from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.kv_dtype import KvDtype
from alignedserve.architectures.quantization import Quantization
from alignedserve.core import Adapter
from alignedserve.engine.engine import Engine
from alignedserve.errors import AlignedServeError
from tests.adapters import ALL, ATTENTION, make_adapter, named, with_adapter
from tests.engine.driver import Driver, prompt_of
from tests.engine.expanded import expanded_reference
from tests.engine.test_int8_kv import Rounding
from tests.engine.test_ranks import Both
from tests.engine.transformers_families import REFUSED, SERVED, make
from tests.models import (
    deepseek_v2,
    deepseek_v3,
    dots1,
    gemma,
    gemma2,
    gemma3,
    glm,
    glm4,
    glm4_moe,
    gpt_oss,
    llama,
    llama4,
    minimax_m2,
    mistral,
    mixtral,
    olmoe,
    opt,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
from tests.reference import CLOSE, Tally, compare, load

PAGE = Path(__file__).with_name("families.md")
PROMPTS, TOKENS, CHUNK = ((1, 37), (2, 21)), 8, 13  # longer than any window of these models

# The last bit of K or V may decide between two levels of int8; logits then differ by this share of the largest at most.
A_LEVEL = 0.01

OWN: dict[str, Callable[[Path], Path]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "opt": opt,
    "llama4_text": llama4,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "mixtral": mixtral,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
    "dots1": dots1,
    "olmoe": olmoe,
    "glm4_moe": glm4_moe,
    "minimax_m2": minimax_m2,
    "gpt_oss": gpt_oss,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "phi3": phi3,
    "glm": glm,
    "glm4": glm4,
}


# --- What is tried


@dataclass(frozen=True)
class Subject:
    """A family's model: its folder, and the same model in transformers."""

    folder: Path
    reference: Any

    def engine(self, **options: Any) -> Engine:
        return Engine(self.folder, num_blocks=40, block_size=4, dtype="float32", **options)

    def check(
        self,
        engine: Any,
        reference: Any,
        is_hidden: bool = False,
        close: float = CLOSE,
        adapter: Adapter | None = None,
    ) -> None:
        """Compare requests whose prompts run in chunks, and which decode together."""
        driver, tally = Driver(engine, 1), Tally()
        start = driver.start_hidden if is_hidden else driver.start_either_way
        lives = [start(f"r{seed}", prompt_of(seed, length), TOKENS) for seed, length in PROMPTS]
        for live in lives:
            live.adapter = adapter
            while live.in_prompt:
                driver.run(live, parts=[live.chunk(CHUNK)])
        while len(lives[0].output) < TOKENS:
            driver.run(*lives, parts=[live.decode() for live in lives])
        for live in lives:
            compare(reference, live.prompt, live.output, tally, f"{self.folder.name}, {live.name}", close)
        tally.check()


def by_itself(subject: Subject) -> None:
    subject.check(subject.engine(), subject.reference)


def on_two_ranks(subject: Subject) -> None:
    with ThreadPoolExecutor(2) as pool:
        subject.check(Both(subject.folder, pool), subject.reference)


def with_int8_kv(subject: Subject) -> None:
    _refuse(read_config(subject.folder).why_not_int8)
    subject.check(subject.engine(kv_dtype=KvDtype.INT8), Rounding(subject.reference), close=A_LEVEL)


def with_hidden_vectors(subject: Subject) -> None:
    engine = subject.engine()
    _refuse(engine.form.why_not)
    subject.check(engine, subject.reference, is_hidden=True)


def with_an_adapter(subject: Subject) -> None:
    """An adapter of all linear layers; of a mixture's attention, since none may change experts."""
    targets = ATTENTION if read_config(subject.folder).has_experts else ALL
    folder = make_adapter(subject.folder, subject.folder.parent / "adapter", seed=1, targets=targets)
    adapter = named("adapter", folder, subject.folder)
    subject.check(subject.engine(), with_adapter(subject.folder, folder), adapter=adapter)


def in_8_bits(subject: Subject) -> None:
    _quantised(subject, Quantization.INT8)


def in_4_bits(subject: Subject) -> None:
    _quantised(subject, Quantization.INT4)


def _refuse(why: str | None) -> None:
    """Raise what a deployment says before its engine is made."""
    if why is not None:
        raise AlignedServeError(why)


def _quantised(subject: Subject, quantization: Quantization) -> None:
    engine = subject.engine(quantization=quantization)
    subject.check(engine, expanded_reference(subject.folder, quantization))


FEATURES: dict[str, Callable[[Subject], None]] = {
    "two ranks": on_two_ranks,
    "KV in int8": with_int8_kv,
    "hidden vectors": with_hidden_vectors,
    "LoRA": with_an_adapter,
    "`int8`": in_8_bits,
    "`int4`": in_4_bits,
}


# --- The table


@dataclass(frozen=True)
class Row:
    """What was found of a family: for each feature, why the engine refuses it, or None where it works."""

    family: str
    is_own: bool
    refusals: tuple[str | None, ...]

    @property
    def cells(self) -> tuple[str, ...]:
        runs = "our module" if self.is_own else "transformers"
        return (self.family, runs, *("yes" if why is None else "no" for why in self.refusals))


def rows(families: Iterable[str]) -> Iterator[Row]:
    for family in families:
        with TemporaryDirectory() as parent:
            folder = Path(parent) / family
            if family in OWN:
                OWN[family](folder)
            else:
                make(folder, family, **SERVED[family])
            yield row_of(family, folder)


def row_of(family: str, folder: Path) -> Row:
    subject = Subject(folder, load(folder))
    by_itself(subject)
    is_own = not isinstance(read_config(folder), GenericConfig)
    return Row(family, is_own, tuple(_refusal(feature, subject) for feature in FEATURES.values()))


def _refusal(feature: Callable[[Subject], None], subject: Subject) -> str | None:
    """Try a feature: return why the engine refuses it, or None where it works; another failure is a fault of ours."""
    try:
        feature(subject)
    except AlignedServeError as refusal:
        return str(refusal)
    return None


def table(found: Sequence[Row]) -> str:
    header = ("family", "runs by", *FEATURES)
    lines = (header, ("---",) * len(header), *(row.cells for row in found))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def refused() -> str:
    """Return the refused families by reason, as part of the engine's line says it."""
    families: dict[str, list[str]] = {}
    for family, (_, why) in REFUSED.items():
        families.setdefault(why, []).append(family)
    rows = (f"| {why} | {', '.join(sorted(named))} |\n" for why, named in sorted(families.items()))
    return "\n## Refused\n\n| why | `model_type` |\n| --- | --- |\n" + "".join(rows)


DIVERGENCE = "## What forms cost"
HEAD = """\
# Families

Tiny random models of each family, by `model_type`, were tried with each feature in fp32:
`python -m tests.engine.family_table` writes this page. **yes**: greedy output equals that of transformers, token for
token, with prompts in chunks and requests together. **no**: the engine refuses it in a line. docs/guides/models.md says
what each feature does.

"""


def page(found: Sequence[Row], before: str) -> str:
    """Return the page, with the section that `python -m lab.benchmarks.accuracy --page` keeps as it was before."""
    return HEAD + table(found) + refused() + "".join(before.partition(f"\n{DIVERGENCE}\n")[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="tried alone, and printed")
    named = parser.parse_args().families
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    every = [*OWN, *(family for family in SERVED if family in transformers.CONFIG_MAPPING)]
    if unknown := set(named) - set(every):
        sys.exit(f"not served: {', '.join(sorted(unknown))}; the families are {', '.join(every)}")
    found = []
    for row in rows(named or every):
        print(" | ".join(row.cells), flush=True)
        for feature, why in zip(FEATURES, row.refusals, strict=True):
            if named and why is not None:
                print(f"  {feature}: {why}")
        found.append(row)
    if not named:
        PAGE.write_text(page(found, PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
