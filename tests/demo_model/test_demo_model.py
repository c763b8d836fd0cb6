"""Tests that the committed folder is what it says, and answers held-out prompts well enough to be served."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo_corpus import KINDS
from eval_demo_model import Answered, answer_kind, figures, table
from tests.conftest import SOAK
from train_demo_model import corpus_fingerprint

FOLDER = Path(__file__).resolve().parents[2] / "alignedserve" / "demo_model"
PER_KIND = 60 if SOAK else 6

# The committed model falls short of the evaluation's goals: docs/reference/demo_model.md has its figures. Until it is
# trained anew it must at least not be worse than it is.
OVERALL_FLOOR, KIND_FLOOR, ENDED_FLOOR, CORRELATION_FLOOR = 0.84, 0.3, 0.97, 0.5
SAME_TEXT_FLOOR = 0.98


@pytest.fixture(scope="module")
def answered() -> dict[str, list[Answered]]:
    return {
        dtype: [answer for kind in KINDS for answer in answer_kind(FOLDER, dtype, kind, seed=1, prompts=PER_KIND)]
        for dtype in ("float32", "bfloat16")
    }


def test_the_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 10_000_000


def test_it_is_a_small_llama_in_bf16() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["model_type"] == "llama"
    assert config["max_position_embeddings"] == 2048
    with safe_open(FOLDER / "model.safetensors", "pt") as weights:
        tensors = [weights.get_tensor(name) for name in weights.keys()]  # noqa: SIM118 (no mapping)
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert 3_000_000 <= sum(tensor.numel() for tensor in tensors) <= 4_500_000


def test_it_was_trained_on_the_corpus_that_is_here() -> None:
    """A change of the generator requires a new training: the model's figures describe the corpus that it knows."""
    training = json.loads((FOLDER / "training.json").read_text())
    assert training["corpus"] == corpus_fingerprint(training["settings"]["seed"])
    assert training["weights_sha256"] == hashlib.sha256((FOLDER / "model.safetensors").read_bytes()).hexdigest()


def test_it_answers_held_out_prompts(answered: dict[str, list[Answered]]) -> None:
    of = figures("float32", answered["float32"])
    print(table(of))
    assert of.right >= OVERALL_FLOOR
    assert [kind for kind in of.kinds if kind.right < KIND_FLOOR] == []


def test_lengths_follow_the_prompt(answered: dict[str, list[Answered]]) -> None:
    of = {kind.kind: kind.length_correlation for kind in figures("float32", answered["float32"]).kinds}
    for kind in ("count_up", "count_down", "count_steps", "list"):
        correlation = of[kind]
        assert correlation is not None
        assert correlation > CORRELATION_FLOOR, kind


def test_bf16_writes_what_fp32_writes(answered: dict[str, list[Answered]]) -> None:
    pairs = list(zip(answered["float32"], answered["bfloat16"], strict=True))
    assert sum(full.written == half.written for full, half in pairs) / len(pairs) >= SAME_TEXT_FLOOR


def test_nearly_every_answer_ends_by_itself(answered: dict[str, list[Answered]]) -> None:
    assert sum(answer.ended for answer in answered["float32"]) / len(answered["float32"]) >= ENDED_FLOOR


def test_it_still_writes_words_at_the_end_of_its_positions() -> None:
    """A long chat fills the context up to the last positions, and the answer is still right: no NaN, no foreign
    token."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    turn = [{"role": "user", "content": "Spell cat."}, {"role": "assistant", "content": "c a t"}]
    ids = tokenizer.apply_chat_template(
        [*turn * 120, {"role": "user", "content": "Count from 3 to 12."}],
        add_generation_prompt=True,
        return_dict=False,
    )
    ids = ids[:1] + ids[len(ids) - 2000 :]
    out = model.generate(torch.tensor([ids]), do_sample=False, max_length=2048)[0, len(ids) :].tolist()
    assert tokenizer.decode(out, skip_special_tokens=True) == "3, 4, 5, 6, 7, 8, 9, 10, 11, 12"
