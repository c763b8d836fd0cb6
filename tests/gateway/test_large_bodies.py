"""What is wrong with a body many times over is looked for once: it costs neither seconds nor gigabytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from alignedserve.gateway.openai_types import ChatRequest, CompletionRequest

MANY = 20_000
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION: dict[str, Any] = {"model": "demo", "prompt": "Hi"}
NAMED = {str(number): "a" for number in range(MANY)}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, {**CHAT, "messages": [{}] * MANY}),
        (ChatRequest, {**CHAT, "messages": [[]] * MANY}),
        (ChatRequest, {**CHAT, "messages": [{"role": "user", "content": ""}] * MANY}),
        (ChatRequest, {**CHAT, "messages": [{"role": "user", "content": [{}] * MANY}]}),
        (ChatRequest, {**CHAT, "messages": [{"role": "user", "content": "", **NAMED}]}),
        (ChatRequest, {**CHAT, **NAMED}),
        (ChatRequest, {**CHAT, "metadata": NAMED}),
        (ChatRequest, {**CHAT, "logit_bias": NAMED}),
        (ChatRequest, {**CHAT, "stop": [5] * MANY}),
        (ChatRequest, {**CHAT, "stop_token_ids": [""] * MANY}),
        (ChatRequest, {**CHAT, "allowed_token_ids": [-1] * MANY}),
        (ChatRequest, {**CHAT, "guided_choice": [""] * MANY}),
        (CompletionRequest, {**COMPLETION, "prompt": [{}] * MANY}),
        (CompletionRequest, {**COMPLETION, "prompt": [5] + [{}] * MANY}),
        (CompletionRequest, {**COMPLETION, "prompt": [[1]] + [[]] * MANY}),
        (CompletionRequest, {**COMPLETION, "prompt": [[1] + [-1] * MANY]}),
        (CompletionRequest, {**COMPLETION, "prompt": ["a"] * MANY}),
    ],
    ids=lambda given: json.dumps(given)[:60] if isinstance(given, dict) else given.__name__,
)
def test_few_faults_are_written_down(kind: type[ChatRequest | CompletionRequest], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() <= 3
