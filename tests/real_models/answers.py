"""What transformers answers in fp32 to the prompts of SmolLM2's tests, kept so that few need to be computed again.

    python -m tests.real_models.answers    # writes answers.json: two minutes

A key is of the prompt's tokens: a prompt that is not in the file is answered by transformers when it is compared. So is
every answer that differs from the file's, since transformers may hardly tell two tokens apart.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

FILE = Path(__file__).with_name("answers.json")


def key_of(prompt: Sequence[int]) -> str:
    return hashlib.sha256(repr(tuple(prompt)).encode()).hexdigest()[:16]


@cache
def kept() -> Mapping[str, list[int]]:
    found: Mapping[str, list[int]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def is_kept(prompt: Sequence[int], output: Sequence[int]) -> bool:
    """Return whether this is how transformers' kept answer to the prompt begins."""
    answer = kept().get(key_of(prompt), [])
    return 0 < len(output) <= len(answer) and answer[: len(output)] == [*output]


@torch.inference_mode()
def answer_of(reference: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    """Return the greedy answer, in one pass over the prompt and one for each token, with transformers' own cache."""
    output, cache, read = list[int](), None, [*prompt]
    while len(output) < tokens:
        found = reference(input_ids=torch.tensor([read]), past_key_values=cache, use_cache=True)
        cache, read = found.past_key_values, [int(found.logits[0, -1].argmax())]
        output += read
    return output


def main() -> None:
    from tests.real_models.conftest import TOKENS, opened
    from tests.real_models.test_answers import LENGTHS, long_prompt

    with opened() as real:
        prompts = [*real.prompts, *(long_prompt(real, length) for length in LENGTHS)]
        answers = {key_of(prompt): answer_of(real.reference, prompt, TOKENS) for prompt in prompts}
    rows = ",\n".join(f'"{key}": {json.dumps(answer)}' for key, answer in answers.items())
    FILE.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
