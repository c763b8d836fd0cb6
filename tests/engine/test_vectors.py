"""Tests that vectors equal those of sentence-transformers: whatever runs beside them, and however a text is cut."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import reduce
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.quantization import Quantization
from alignedserve.architectures.vectors import read_pooled
from alignedserve.core import POOLED, Chunk, Decode, KvForm, PooledTask, Pooling, Sampling, StepPlan, StepResult
from alignedserve.engine.engine import Engine
from alignedserve.engine.models.families.bert import Bert
from alignedserve.errors import ModelError, PlanError, UnsupportedModel
from tests.models import MODELS
from tests.pooled_folders import (
    WORDS,
    change_config,
    decoder_config,
    embedding_folder,
    encoder_config,
    reranker_folder,
)
from tests.rare import rarely, thinned

BLOCK = 16
CLOSE = 1e-3
EXACT = 1e-5  # of encoders in fp32: the length of the difference by that of the vector
LENGTHS = (1, 7, 7, 30, 2, 64, 7, 100, 15)
STATES = ("gqa-untied", "opt", "opt-350m", "deepseek-v2")  # other last layers
FAMILIES = ("bert", "roberta", "xlm-roberta", "electra", "modernbert")


def texts(seed: int = 0) -> list[str]:
    words = Random(seed)
    return [" ".join(words.choices(WORDS, k=length)) for length in LENGTHS]


def engine_of(folder: Path, dtype: str = "float32", quantization: Quantization = Quantization.NONE) -> Engine:
    return Engine(folder, num_blocks=200, block_size=BLOCK, dtype=dtype, quantization=quantization)


def chunk(number: int, tokens: Sequence[int], pooling: Pooling | None, start: int = 0) -> Chunk:
    blocks = tuple(range(10 * number, 10 * number + 10))
    return Chunk(f"r{number}", tuple(tokens), start, KvForm(blocks), None, pooling=pooling)


def vectors_of(result: StepResult) -> dict[str, list[float]]:
    return {request: array("f", vector).tolist() for request, vector in result.vectors}


def off(found: list[float], wanted: Any) -> float:
    return float((torch.tensor(found) - torch.as_tensor(wanted)).abs().max())


def relative(found: list[float], wanted: Any) -> float:
    reference = torch.as_tensor(wanted)
    return float((torch.tensor(found) - reference).norm() / reference.norm())


def check_all(folder: Path, reference: Any, is_whole: bool, close: float = CLOSE, dtype: str = "float32") -> None:
    """Run all texts in one step, and compare the vector of each."""
    engine, given = engine_of(folder, dtype), texts()
    ids = [reference.tokenizer(text)["input_ids"] for text in given]
    result = engine.step(
        StepPlan(1, tuple(chunk(n, tokens, Pooling(is_whole=is_whole)) for n, tokens in enumerate(ids)))
    )
    wanted, found = reference.encode(given), vectors_of(result)
    assert result.tokens == tuple((f"r{number}", POOLED) for number in range(len(given)))
    for number in range(len(given)):
        assert relative(found[f"r{number}"], wanted[number]) < close, f"text of {LENGTHS[number]} words"


def sentence_transformer(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


@pytest.mark.parametrize(("family", "kind"), thinned(product(FAMILIES, ("mean", "cls")), usual=1))
def test_encoders_in_one_step(family: str, kind: str, tmp_path: Path) -> None:
    folder = embedding_folder(tmp_path, encoder_config(family), kind, is_normalised=kind == "mean")
    check_all(folder, sentence_transformer(folder), is_whole=True, close=EXACT)


def test_a_dense_layer_follows_the_pooling(tmp_path: Path) -> None:
    folder = embedding_folder(tmp_path, encoder_config("bert"), "mean", dense=12)
    assert read_pooled(folder, read_config(folder)).size == 12
    check_all(folder, sentence_transformer(folder), is_whole=True, close=EXACT)


def test_norms_under_the_names_of_the_first_files(tmp_path: Path) -> None:
    folder = embedding_folder(tmp_path, encoder_config("bert"), "mean")
    reference, path = sentence_transformer(folder), folder / "model.safetensors"
    old = {".LayerNorm.weight": ".LayerNorm.gamma", ".LayerNorm.bias": ".LayerNorm.beta"}
    tensors = {reduce(lambda name, new: name.replace(*new), old.items(), n): t for n, t in load_file(path).items()}
    save_file(tensors, path)
    check_all(folder, reference, is_whole=True, close=EXACT)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = embedding_folder(tmp_path, encoder_config("xlm-roberta"), "cls")
    path = folder / "model.safetensors"
    lacking = "encoder.layer.1.attention.self.key.weight"
    save_file({name: tensor for name, tensor in load_file(path).items() if name != lacking}, path)
    with pytest.raises(ModelError, match=rf"tensor roberta\.{lacking} is missing"):
        engine_of(folder)


def test_an_encoder_in_bf16_is_near(tmp_path: Path) -> None:
    folder = embedding_folder(tmp_path, encoder_config("bert"), "mean")
    check_all(folder, sentence_transformer(folder), is_whole=True, close=0.05, dtype="bfloat16")


@pytest.mark.parametrize(
    ("family", "kind"), thinned(product(("llama", "qwen3", "gemma3"), ("lasttoken", "mean")), usual=2)
)
def test_decoders_in_one_step(family: str, kind: str, tmp_path: Path) -> None:
    folder = embedding_folder(tmp_path, decoder_config(family), kind)
    check_all(folder, sentence_transformer(folder), is_whole=kind == "mean")


@pytest.mark.parametrize("activation", thinned(("gelu_new", "relu"), usual=1))
def test_another_activation_is_that_of_transformers(activation: str, tmp_path: Path) -> None:
    folder = embedding_folder(tmp_path, encoder_config("bert", hidden_act=activation), "mean")
    check_all(folder, sentence_transformer(folder), is_whole=True)


def test_more_texts_than_go_through_a_layer_together(tmp_path: Path) -> None:
    """Rows behind attention run in parts: a text may lie in two of them."""
    folder = embedding_folder(tmp_path, encoder_config("bert"), "mean")
    reference, given = sentence_transformer(folder), texts()[7]
    ids, whole, blocks = reference.tokenizer(given)["input_ids"], Pooling(is_whole=True), tuple(range(10))
    chunks = tuple(Chunk(f"r{number}", tuple(ids), 0, KvForm(blocks), None, pooling=whole) for number in range(25))
    wanted, found = reference.encode(given), vectors_of(engine_of(folder).step(StepPlan(1, chunks)))
    for number in range(25):
        assert off(found[f"r{number}"], wanted) < CLOSE


@pytest.mark.parametrize(
    ("family", "quantization", "least"),
    [
        ("bert", Quantization.INT4, 0.9),
        ("modernbert", Quantization.INT8, 0.999),
        rarely(("electra", Quantization.INT8, 0.999)),
        rarely(("bert", Quantization.INT8, 0.999)),
        rarely(("electra", Quantization.INT4, 0.9)),
    ],
)
def test_a_quantised_encoder_is_near(family: str, quantization: Quantization, least: float, tmp_path: Path) -> None:
    folder = embedding_folder(tmp_path, encoder_config(family), "mean")
    ids = sentence_transformer(folder).tokenizer(texts()[3])["input_ids"]
    plan = StepPlan(1, (chunk(0, ids, Pooling(is_whole=True)),))
    plain, found = (
        torch.tensor(vectors_of(engine_of(folder, quantization=kind).step(plan))["r0"])
        for kind in (Quantization.NONE, quantization)
    )
    assert float(plain @ found) > least
    assert not torch.equal(plain, found)


def test_a_text_in_chunks_beside_a_chat(tmp_path: Path) -> None:
    """The last token's state needs the KV of those before it: they may have come in chunks, in steps with decodes."""
    folder = embedding_folder(tmp_path, decoder_config("llama"), "lasttoken")
    engine, reference, given = engine_of(folder), sentence_transformer(folder), texts()[7]
    ids, chat = reference.tokenizer(given)["input_ids"], (5, 6, 7)
    blocks = (150,)
    first = engine.step(StepPlan(1, (Chunk("chat", chat, 0, KvForm(blocks), Sampling()), chunk(0, ids[:40], None))))
    alone = dict(first.tokens)["chat"]
    decode = Decode("chat", alone, 3, KvForm(blocks), Sampling(), 1)
    result = engine.step(StepPlan(2, (chunk(0, ids[40:], Pooling(), start=40),), (decode,)))
    assert off(vectors_of(result)["r0"], reference.encode(given)) < CLOSE
    assert set(dict(result.tokens)) == {"r0", "chat"}
    again = engine_of(folder)
    again.step(StepPlan(1, (Chunk("chat", chat, 0, KvForm(blocks), Sampling()),)))
    lone = again.step(StepPlan(2, (), (decode,)))
    assert dict(lone.tokens)["chat"] == dict(result.tokens)["chat"], "the vector beside it changes no token"


def test_fewer_dimensions_have_length_1_again(tmp_path: Path) -> None:
    folder = embedding_folder(tmp_path, encoder_config("bert"), "mean")
    ids = sentence_transformer(folder).tokenizer(texts()[3])["input_ids"]
    wholes = Pooling(is_whole=True), Pooling(is_whole=True, dimensions=8)
    found = vectors_of(engine_of(folder).step(StepPlan(1, tuple(chunk(n, ids, it) for n, it in enumerate(wholes)))))
    wanted = torch.nn.functional.normalize(torch.tensor(found["r0"][:8]), dim=0)
    assert off(found["r1"], wanted) < 1e-6


@pytest.mark.parametrize("family", thinned(FAMILIES, usual=3))
def test_rerankers_score_pairs(family: str, tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    folder = reranker_folder(tmp_path, encoder_config(family, num_labels=1))
    reference, given = CrossEncoder(str(folder), device="cpu"), texts()
    pairs = [*zip(given, texts(1), strict=True)][:5]
    engine, chunks = engine_of(folder), []
    for number, (one, other) in enumerate(pairs):
        read = reference.tokenizer(one, other)
        kinds = read.get("token_type_ids", ())
        pooling = Pooling(PooledTask.SCORE, True, second_at=kinds.index(1) if 1 in kinds else None)
        chunks.append(chunk(number, read["input_ids"], pooling))
    found = vectors_of(engine.step(StepPlan(1, tuple(chunks))))
    for number, wanted in enumerate(reference.predict(pairs)):
        assert abs(found[f"r{number}"][0] / float(wanted) - 1) < EXACT


def test_a_decoder_with_a_head_scores_pairs(tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    folder = reranker_folder(tmp_path, decoder_config("qwen3", num_labels=1), "$A [SEP]")
    reference = CrossEncoder(str(folder), device="cpu")
    pairs = [("w1 w2", "w3 w4 w5"), ("w1 w2", "w9")]
    chunks = [
        chunk(number, reference.tokenizer(*pair)["input_ids"], Pooling(PooledTask.SCORE))
        for number, pair in enumerate(pairs)
    ]
    found = vectors_of(engine_of(folder).step(StepPlan(1, tuple(chunks))))
    for number, wanted in enumerate(reference.predict(pairs)):
        assert off(found[f"r{number}"], wanted) < CLOSE


@pytest.mark.parametrize("folder", [each if each in STATES else rarely(each) for each in MODELS], indirect=True)
def test_a_plain_decoder_gives_the_state_of_its_last_token(folder: Path) -> None:
    from transformers import AutoModel

    engine, ids = engine_of(folder), (5, 9, 3, 8)
    found = vectors_of(engine.step(StepPlan(1, (chunk(0, ids, Pooling()),))))["r0"]
    with torch.inference_mode():
        states = AutoModel.from_pretrained(folder, dtype=torch.float32)(torch.tensor([ids])).last_hidden_state[0, -1]
    assert off(found, torch.nn.functional.normalize(states, dim=0)) < CLOSE


def test_numbers_that_are_not_finite_harm_no_other(tmp_path: Path) -> None:
    folder = embedding_folder(tmp_path, encoder_config("bert"), "mean")
    engine = engine_of(folder)
    assert engine._encoder is not None
    assert isinstance(engine._encoder.model, Bert)
    with torch.inference_mode():
        engine._encoder.model.words[7] = float("nan")
    whole = Pooling(is_whole=True)
    result = engine.step(StepPlan(1, (chunk(0, (1, 7, 2), whole), chunk(1, (1, 8, 2), whole))))
    assert result.unsampled == ("r0",)
    assert [request for request, _ in result.vectors] == ["r1"]


def test_a_vector_of_all_tokens_needs_them_all_in_one_step(tmp_path: Path) -> None:
    folder = embedding_folder(tmp_path, encoder_config("bert"), "mean")
    with pytest.raises(PlanError, match="is to start behind some"):
        engine_of(folder).step(StepPlan(1, (chunk(0, (8, 2), Pooling(is_whole=True), start=4),)))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"is_decoder": True}, "is_decoder"),
        ({"position_embedding_type": "relative_key"}, "relative positions"),
    ],
)
def test_encoders_of_another_kind_are_refused(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    folder = embedding_folder(tmp_path, encoder_config("bert"), "mean")
    change_config(folder, **changes)
    with pytest.raises(UnsupportedModel, match=why):
        read_config(folder)


def test_a_pooling_that_is_not_known_is_named(tmp_path: Path) -> None:
    folder = embedding_folder(tmp_path, encoder_config("bert"), "max")
    with pytest.raises(UnsupportedModel, match=r"pooling max is not supported: cls, mean, lasttoken are"):
        read_pooled(folder, read_config(folder))
