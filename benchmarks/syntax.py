"""Measure the time of a syntax: `python -m benchmarks.syntax`, with a small vocabulary and a large one.

Texts are random tokens that the mask of a random schema allows. Figures are processor time, which other work on the
machine changes little.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import mean, quantiles
from tempfile import TemporaryDirectory

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from alignedserve.core import Sampling
from alignedserve.engine.sampling.grammar import make_grammar
from alignedserve.text.syntax import Syntaxes, json_syntax
from benchmarks.report import command, report
from tests.schemas import schema

SIZES = (2_048, 128_000)
NUM_SCHEMAS = 60
MOST_TOKENS = 80
STOP = 0


def tokenizer_of(size: int, draw: Random) -> str:
    """Make a tokenizer with tokens for bytes and for the parts of JSON and of words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(["<|end|>", *alphabet])}
    letters = [*"abcdefghijklmnopqrstuvwxyz" * 3, *'0123456789{}[]",:-.', "\u0120", "\u010a"]
    while len(vocabulary) < size:
        vocabulary.setdefault("".join(draw.choices(letters, k=draw.randint(2, 9))), len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    return str(tokenizer.to_str())


def main() -> None:
    command(__doc__).parse_args()
    for size in SIZES:
        with TemporaryDirectory() as folder:
            Path(folder, "tokenizer.json").write_text(tokenizer_of(size, Random(1)), encoding="utf-8")
            syntaxes = Syntaxes(Path(folder))
            began = time.process_time()
            syntaxes.load()
            report(f"tokenizer/{size}", time.process_time() - began, "s")
            compiled, tokens = [], []
            for number in range(NUM_SCHEMAS):
                first, *others = _seconds(syntaxes, schema(Random(number)), size, Random(number))
                compiled.append(first)
                tokens += others
        report(f"schema/{size}", mean(compiled) * 1e6, "us")
        report(f"token_mean/{size}", mean(tokens) * 1e6, "us")
        report(f"token_p99/{size}", quantiles(tokens, n=100)[98] * 1e6, "us")


def _seconds(syntaxes: Syntaxes, wanted: object, size: int, draw: Random) -> Iterator[float]:
    """Yield the time to make the grammar, then the time of each token's advance and the next mask."""
    began = time.process_time()
    grammar = make_grammar(Sampling(syntax=json_syntax(wanted)), (STOP,), size, syntaxes)
    assert grammar is not None
    mask = grammar.mask()
    yield time.process_time() - began
    for _ in range(MOST_TOKENS):
        token = draw.choice(mask.nonzero().flatten().tolist())
        if token == STOP:
            return
        began = time.process_time()
        grammar.advance(token)
        mask = grammar.mask()
        yield time.process_time() - began


if __name__ == "__main__":
    main()
