"""Tests with a published model that is not fetched by itself: Gemma 3 270M, most of whose layers have a window."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from alignedserve.architectures.model_source import resolve
from alignedserve.core import Chunk, Decode, KvForm, Sampling, StepPlan
from alignedserve.engine.engine import Engine
from alignedserve.lab.benchmarks.common.one_pass import divergence
from alignedserve.text.text_model import TextModel
from tests.conftest import SOAK
from tests.real_models.answers import is_kept, kept, key_of
from tests.real_models.logits import kept_logits, prompt_logits
from tests.real_models.others import GEMMA
from tests.reference import Tally, compare

PROSE = Path(__file__).with_name("prose.txt")  # a story, facts, a list, code, French and a recipe

BLOCK, CHUNK, ANSWER = 16, 192, 24
LONG = 1200 if SOAK else 700  # tokens; a window has 512
PROMPTS = ["The capital of France is", "def fibonacci(n):", "Das Wetter in Hamburg ist heute", "1, 1, 2, 3, 5, 8,"]


def decode_logits(engine: Engine, texts: Sequence[Sequence[int]], first: int) -> torch.Tensor:
    """Return the logits after each token of texts of one length, from token `first` on, text by text.

    The tokens before are prompts; the others run as decode steps of one token for each text.
    """
    (length,) = {len(text) for text in texts}
    each = -(-length // engine.block_size)
    forms = [KvForm(tuple(range(at * each, (at + 1) * each))) for at in range(len(texts))]
    for at, text in enumerate(texts):
        engine.step(StepPlan(at, (Chunk(str(at), tuple(text[:first]), 0, forms[at], None),), ()))
    with kept_logits(engine) as kept:
        for index in range(first, length):
            decodes = (Decode(str(at), t[index], index, forms[at], Sampling(), index) for at, t in enumerate(texts))
            engine.step(StepPlan(len(texts) + index, (), tuple(decodes)))
    return torch.stack(kept, 1).flatten(0, 1)


@pytest.fixture(scope="module")
def file() -> Path:
    return GEMMA.found()


@pytest.fixture(scope="module")
def folder(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve(str(file), str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def text(folder: Path) -> TextModel:
    return TextModel.load(folder)


@lru_cache(maxsize=1)
def reference(file: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


@torch.inference_mode()
def expected_logits(file: Path, tokens: Sequence[int]) -> torch.Tensor:
    logits: torch.Tensor = reference(file)(torch.tensor([tokens])).logits[0]
    return logits


def their_tokens(file: Path) -> list[int]:
    """Return transformers' tokens of the prose."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokens: list[int] = theirs(PROSE.read_text(encoding="utf-8"))["input_ids"]
    return tokens


def prompts_of(text: TextModel) -> list[list[int]]:
    """Return short prompts, one that a window holds, and one that is longer."""
    prose = text.prompt_ids(PROSE.read_text(encoding="utf-8"))
    return [*map(text.prompt_ids, PROMPTS), prose[:500], prose[:LONG]]


def test_its_text_becomes_the_tokens_of_transformers(file: Path, text: TextModel) -> None:
    """The long form has transformers read the text, which takes it half a minute."""
    tokens = text.prompt_ids(PROSE.read_text(encoding="utf-8"))
    assert tokens == their_tokens(file) if SOAK else key_of(tokens) in kept()


def test_greedy_answers_are_those_of_transformers(file: Path, folder: Path, text: TextModel) -> None:
    """Also after more tokens than a window has, in chunks that begin before it and end behind it.

    The short form has a short prompt and the longest."""
    engine = Engine(folder, num_blocks=-(-(LONG + ANSWER) // BLOCK), block_size=BLOCK, dtype="float32")
    tally = Tally()
    for prompt in prompts_of(text)[:: 1 if SOAK else 5]:
        answer = greedy(engine, prompt)
        assert len(answer) == ANSWER
        if SOAK or not is_kept(prompt, answer):
            compare(reference(file), prompt, answer, tally, f"{len(prompt)} tokens of prompt")
    tally.check()


@pytest.mark.skipif(not SOAK, reason="it needs the logits of transformers; test_divergence.py compares another model's")
def test_next_tokens_in_bf16_stay_near_those_in_fp32(file: Path, folder: Path, text: TextModel) -> None:
    tokens = text.prompt_ids(PROSE.read_text(encoding="utf-8"))[:512]
    engine = Engine(folder, num_blocks=64, block_size=BLOCK, dtype="bfloat16")
    texts = [[*tokens[:1], *tokens[at : at + 63]] for at in range(1, 505, 63)]
    eight = torch.cat([expected_logits(file, part)[32:] for part in texts])
    for found in (
        divergence(expected_logits(file, tokens), prompt_logits(engine, tokens)),
        divergence(eight, decode_logits(engine, texts, 32)),
    ):
        assert found.mean <= 0.004
        assert found.same >= 0.95


def greedy(engine: Engine, prompt: Sequence[int]) -> list[int]:
    """Return the tokens that follow a prompt, which runs in chunks."""
    sampling, blocks = Sampling(), tuple(range(engine.num_blocks))
    output: list[int] = []
    for start in range(0, len(prompt), CHUNK):
        part = tuple(prompt[start : start + CHUNK])
        last = start + CHUNK >= len(prompt)
        chunk = Chunk("r", part, start, KvForm(blocks), sampling if last else None)
        output += [token for _, token in engine.step(StepPlan(start, (chunk,), ())).tokens]
    while len(output) < ANSWER:
        start = len(prompt) + len(output) - 1
        decode = Decode("r", output[-1], start, KvForm(blocks), sampling, len(output))
        output += [token for _, token in engine.step(StepPlan(start, (), (decode,))).tokens]
    return output
