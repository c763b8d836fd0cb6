"""Measure embeddings against sentence-transformers, in turns: `python -m lab.benchmarks.embeddings`, two minutes.

    python -m lab.benchmarks.embeddings [--dtype bfloat16] [--texts 32] [--step-tokens 4096] [--rounds 5] [--busy]

The model is a BERT of base size (110 M parameters, random). Both tokenise the same texts, pool means in the same dtype,
and use the same threads. Ours runs them in steps of --step-tokens, as its engine packs them; `encode` sorts them by
length and pads batches of 32. Texts are long (512 tokens) or mixed and short (4 to 128 tokens, most of them short). A
figure is the median of tokens/s, special tokens included; the largest difference of the vectors is printed too. On a
machine that does other work --busy gives both a single thread, and counts its processor time.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

import torch

from alignedserve.core import Chunk, Pooling, StepPlan, units_for
from alignedserve.engine.engine import Engine
from alignedserve.lab.benchmarks.common.report import command, report, status
from alignedserve.lab.benchmarks.common.timing import in_turns
from alignedserve.text.text_model import TextModel

LONG, SHORT, BLOCK, SEED = 512, (4, 128), 16, 1
GOALS = {"long texts": 1.0, "mixed short texts": 2.0}  # times the peer's tokens/s
_MARKS = 2  # tokens around a text
_CLOSE = {"float32": 1e-3, "bfloat16": 0.1}


def folder_of_words(folder: Path, **shape: Any) -> Path:
    """Save a random BERT as sentence-transformers does, with a tokenizer that knows a word for each token."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling as PoolingModule
    from sentence_transformers.sentence_transformer.modules import Transformer
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    config, plain = BertConfig(**shape), folder / "plain"
    torch.manual_seed(SEED)
    BertModel(config).save_pretrained(plain)
    names = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *(f"w{at}" for at in range(4, config.vocab_size))]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    marks = [("[CLS]", 1), ("[SEP]", 2)]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, marks)
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(plain)
    modules = [Transformer(str(plain)), PoolingModule(config.hidden_size, "mean")]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder / "whole"))
    return folder / "whole"


def texts(lengths: Sequence[int], vocabulary: int) -> list[str]:
    """Return texts of so many tokens each, special tokens included."""
    random = Random(SEED)
    return [" ".join(f"w{random.randrange(4, vocabulary)}" for _ in range(length - _MARKS)) for length in lengths]


def short_lengths(count: int) -> list[int]:
    random, (least, most) = Random(SEED), SHORT
    return [int(least * (most / least) ** random.random()) for _ in range(count)]


class Ours:
    """Our engine, which packs texts into steps."""

    def __init__(self, folder: Path, dtype: str, step_tokens: int) -> None:
        pairs = 2 * units_for(step_tokens, BLOCK)
        self._engine = Engine(folder, num_pairs=pairs, block_size=BLOCK, dtype=dtype, tune_s=5.0)
        self._text, self._step_tokens = TextModel.load(folder), step_tokens

    def encode(self, given: Sequence[str]) -> list[array[float]]:
        vectors: list[array[float]] = []
        step, size = list[list[int]](), 0
        for ids in map(self._text.prompt_ids, given):
            if size + len(ids) > self._step_tokens:
                vectors += self._run(step)
                step, size = [], 0
            step.append(ids)
            size += len(ids)
        return vectors + self._run(step)

    def _run(self, step: Sequence[list[int]]) -> list[array[float]]:
        chunks, first, whole = list[Chunk](), 0, Pooling(is_whole=True)
        for number, ids in enumerate(step):
            end = first + units_for(len(ids), BLOCK)
            chunks.append(Chunk(f"r{number}", tuple(ids), 0, tuple(range(first, end)), None, pooling=whole))
            first = end
        return [array("f", vector) for _, vector in self._engine.step(StepPlan(1, tuple(chunks))).vectors]


def compare(
    ours: Ours, peer: Any, kind: str, lengths: Sequence[int], vocabulary: int, rounds: int, clock: Callable[[], float]
) -> float:
    """Report the rates of both, and return how far their vectors are off."""
    given = texts(lengths, vocabulary)
    wanted = torch.as_tensor(peer.encode(given)).float()
    off = float((torch.tensor([*map(list, ours.encode(given))]) - wanted).abs().max() / wanted.std())
    took = in_turns({"ours": lambda: ours.encode(given), "peer": lambda: peer.encode(given)}, 0.0, rounds, clock)
    rates = {name: sum(lengths) / median(seconds) for name, seconds in took.items()}
    goal = GOALS[kind] * rates["peer"]
    unit = "tokens/s" if clock is perf_counter else "tokens per second of a processor"
    report(kind, rates["ours"], unit, baseline=rates["peer"], goal=goal, at_least=True)
    return off


def main() -> int:
    from sentence_transformers import SentenceTransformer

    parser = command(__doc__)
    parser.add_argument("--dtype", choices=[*_CLOSE], default="bfloat16", help="of weights and states, in both")
    parser.add_argument("--texts", type=int, default=32, help="long ones; eight times as many short ones")
    parser.add_argument("--step-tokens", type=int, default=4096, help="most tokens of a step of ours")
    parser.add_argument("--rounds", type=int, default=5, help="of both, in turns")
    parser.add_argument("--busy", action="store_true", help="one thread each, and its processor time")
    asked = parser.parse_args()
    if asked.busy:
        torch.set_num_threads(1)
    clock = process_time if asked.busy else perf_counter
    vocabulary, off = 30_522, 0.0
    with TemporaryDirectory(prefix="embeddings") as name:
        folder = folder_of_words(Path(name), vocab_size=vocabulary)
        ours = Ours(folder, asked.dtype, asked.step_tokens)
        kept = {"dtype": getattr(torch, asked.dtype)}
        peer = SentenceTransformer(str(folder), device="cpu", model_kwargs=kept)
        for kind, lengths in (
            ("long texts", [LONG] * asked.texts),
            ("mixed short texts", short_lengths(8 * asked.texts)),
        ):
            off = max(off, compare(ours, peer, kind, lengths, vocabulary, asked.rounds, clock))
    report("largest difference of the vectors", off, "of their spread", goal=_CLOSE[asked.dtype])
    return status()


if __name__ == "__main__":
    sys.exit(main())
