"""Tests that deployments of SmolLM2 in bf16 and in quantised forms stay as near to fp32 as one engine in that form.

The words alone are no measure here, unlike in fp32: steps of other sizes round otherwise, so a request beside others,
or one whose first words are in the cache, may choose the other of two tokens that lie near. So each answer comes with
the log-probabilities that the deployment chose by. They are compared, as in test_divergence.py, with those of the same
weights in fp32 after the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import httpx
import pytest
import torch
from torch import Tensor

from alignedserve.kernels.common.reference import Reference
from alignedserve.lab.benchmarks.accuracy import FORMS, LEAST_SAME, POINTS, PUBLISHED_FILE, ModelForm
from alignedserve.lab.benchmarks.common.one_pass import OnePass, divergence
from tests.conftest import SOAK
from tests.end_to_end.deployment import ANSWER_S, NAME, Deployment, deployed
from tests.real_models.conftest import TOKENS, Forms, Real
from tests.real_models.test_served import RANKS, ask, user

TOP = 20  # log-probabilities of a token: the API gives no more
PAIR, RANKED = ("1+1",), ("colocated", *RANKS)
# The words of fp32 are compared in test_served.py; w8a8 rounds activations, so its weights in fp32 are no measure.
OTHERS = [name for name in FORMS if name not in (PUBLISHED_FILE, "fp32", "w8a8")]
CASES = [
    (PUBLISHED_FILE, *PAIR),
    (PUBLISHED_FILE, *RANKED),
    (PUBLISHED_FILE, *PAIR, *RANKS),
    *((name, *kind) for name in OTHERS for kind in (PAIR, RANKED)),
]


pytestmark = pytest.mark.skipif(
    not SOAK, reason="test_divergence.py has these forms in one engine, and test_served.py a deployment in fp32"
)


@dataclass(frozen=True)
class Served:
    name: str  # of the form
    deployment: Deployment
    form: ModelForm
    exact: Callable[[tuple[int, ...]], Tensor]  # logits of the same weights in fp32


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def served(request: pytest.FixtureRequest, forms: Forms) -> Iterator[Served]:
    name, topology, *flags = request.param
    form = ModelForm(forms.model.resolved, Tensor()) if name == PUBLISHED_FILE else forms.of(name)
    # Several ranks quantise without the weight of the layers' inputs, of which none has all.
    squares = {} if flags else form.squares
    exact = OnePass(form.folder, torch.float32, Reference(), form.quantization, squares=squares)
    flags += ["--dtype", str(form.dtype).removeprefix("torch."), "--quantization", form.quantization.value]
    flags += ["--kv-dtype", form.kv_dtype.value, "--max-model-len", "2048"]
    model = forms.model.source if name == PUBLISHED_FILE else form.folder
    with deployed(*flags, topology=topology, model=model) as deployment:
        yield Served(name, deployment, form, cache(exact))


def answer(deployment: Deployment, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], list[dict[str, float]]]:
    """Return a greedy answer's tokens, and the log-probabilities of the best ones at each."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "service_tier": "flex"}
    body |= {"ignore_eos": True, "logprobs": TOP, "return_token_ids": True, "return_tokens_as_token_ids": True}
    told = httpx.post(f"{deployment.url}/v1/completions", json=body, timeout=ANSWER_S, trust_env=False)
    assert told.status_code == 200, told.text
    (choice,) = told.json()["choices"]
    return tuple(choice["token_ids"]), choice["logprobs"]["top_logprobs"]


def completed(expected: Tensor, top: list[dict[str, float]]) -> Tensor:
    """Return log-probabilities of all tokens: what the best leave is shared out as it is expected.

    So the divergence is that of the best and of all others taken as one token, and nothing is invented.
    """
    rows = expected.double().log_softmax(-1)
    for row, best in zip(rows, top, strict=True):
        ids = torch.tensor([int(name.removeprefix("token_id:")) for name in best])
        values = torch.tensor([*best.values()], dtype=torch.float64)
        rest = row.clone()
        rest[ids] = -torch.inf
        left = torch.log1p(-values.exp().sum().clamp(max=1 - 1e-12))
        row += left - rest.logsumexp(-1)
        row[ids] = values
    return rows


def test_answers_stay_near_fp32(served: Served, real: Real) -> None:
    """All are sent at once, twice: their first words are found in the prefix cache, and the second time all are."""
    asked = real.prompts[:: 1 if SOAK else 8] * 2
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = [*pool.map(lambda prompt: answer(served.deployment, prompt), asked)]
    expected, told = [], []
    for prompt, (tokens, top) in zip(asked, answers, strict=True):
        assert len(tokens) == TOKENS
        after = served.exact((*prompt, *tokens[:-1]))[len(prompt) - 1 :]
        expected.append(after)
        told.append(completed(after, top))
        assert all(best[f"token_id:{token}"] == max(best.values()) for token, best in zip(tokens, top, strict=True))
    found = divergence(torch.cat(expected), torch.cat(told))
    print(found)
    assert served.form.goal is not None
    assert found.mean <= served.form.goal, found
    assert found.same >= LEAST_SAME - POINTS, found  # in transformers too rounding to bf16 alone changes some
    assert served.deployment.metric("prompt_tokens_cached_total") > 0


def test_it_does_what_is_asked(served: Served) -> None:
    """The model is sure of each token here: the best is twice as likely as the next, or more."""
    if served.name != PUBLISHED_FILE:
        pytest.skip("weights that are rounded without care, as GPTQ's are here, may say something else in fp32 too")
    choice = ask(served.deployment, user("List the numbers from 1 to 8."), max_tokens=60)
    assert (choice["message"]["content"], choice["finish_reason"]) == ("1, 2, 3, 4, 5, 6, 7, 8", "stop")
