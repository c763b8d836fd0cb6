"""Tests that the committed folder is what it says, and answers prompts well enough to show when serving breaks it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from statistics import mean

import pytest
import torch
import transformers
from safetensors import safe_open

from tests.conftest import SOAK
from tests.demo_conversations import conversations
from tests.rare import rare

FOLDER = Path(__file__).resolve().parents[2] / "alignedserve" / "demo_model"
NUM_KINDS = 16
ASKED = conversations()[: None if SOAK else 6 * NUM_KINDS]
IN_BF16 = ASKED[: None if SOAK else NUM_KINDS]  # it takes long where the processor has no instructions for it

OVERALL_FLOOR, KIND_FLOOR, SAME_FLOOR = 0.9, 0.5, 0.98


@pytest.fixture(scope="module")
def likeliest() -> dict[str, list[tuple[list[int], list[int]]]]:
    """Return, of each type, the tokens of each right answer, and the likeliest token in the place of each."""
    tokenizer, found = transformers.AutoTokenizer.from_pretrained(FOLDER), {}
    for dtype, given in (("float32", ASKED), ("bfloat16", IN_BF16)):
        model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=getattr(torch, dtype))
        found[dtype] = [_likeliest(tokenizer, model, asked.messages, asked.answer) for asked in given]
    return found


def _likeliest(
    tokenizer: transformers.AutoTokenizer, model: torch.nn.Module, messages: list[dict[str, str]], answer: str
) -> tuple[list[int], list[int]]:
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    expected = tokenizer(answer, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + expected])).logits[0, len(prompt) - 1 : -1]
    return expected, logits.argmax(-1).tolist()


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


def test_its_weights_are_those_whose_training_is_described() -> None:
    training = json.loads((FOLDER / "training.json").read_text())
    assert training["weights_sha256"] == hashlib.sha256((FOLDER / "model.safetensors").read_bytes()).hexdigest()


@rare  # its weights are those that were tested when they were made
def test_it_answers_prompts_that_it_was_not_trained_on(likeliest: dict[str, list[tuple[list[int], list[int]]]]) -> None:
    right = [expected == written for expected, written in likeliest["float32"]]
    of_kinds = {kind: mean(right[at::NUM_KINDS]) for at, kind in enumerate(asked.kind for asked in ASKED[:NUM_KINDS])}
    assert len(of_kinds) == NUM_KINDS
    assert mean(right) >= OVERALL_FLOOR, of_kinds
    assert min(of_kinds.values()) >= KIND_FLOOR, of_kinds


@rare
def test_bf16_writes_what_fp32_writes(likeliest: dict[str, list[tuple[list[int], list[int]]]]) -> None:
    pairs = zip(likeliest["float32"], likeliest["bfloat16"], strict=False)
    assert mean(full == half for full, half in pairs) >= SAME_FLOOR


def test_it_still_writes_words_at_the_end_of_its_positions() -> None:
    """A long chat fills the context up to the last positions, and the answer is still right: no NaN, no foreign
    token."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    turn = [{"role": "user", "content": "Spell cat."}, {"role": "assistant", "content": "c a t"}]
    ids = tokenizer.apply_chat_template(
        [*turn * 120, {"role": "user", "content": "Count from 3 to 12."}],
        add_generation_prompt=True,
        return_dict=False,
    )
    ids = ids[:1] + ids[len(ids) - 2000 :]
    out = model.generate(torch.tensor([ids]), do_sample=False, max_length=2048)[0, len(ids) :].tolist()
    assert tokenizer.decode(out, skip_special_tokens=True) == "3, 4, 5, 6, 7, 8, 9, 10, 11, 12"
