"""What transformers answers in fp32 to the prompts of the tests, kept so that few need to be computed again.

    python -m tests.real_models.answers             # writes answers.json, of SmolLM2: two minutes
    python -m tests.real_models.answers --others    # writes others.json, of the model of test_others.py

A key is of the prompt's tokens: a prompt that is not in the file is answered by transformers when it is compared. So is
every answer that differs from the file's, since transformers may hardly tell two tokens apart.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

FILE, OF_OTHERS = (Path(__file__).with_name(name) for name in ("answers.json", "others.json"))


def key_of(prompt: Sequence[int]) -> str:
    return hashlib.sha256(repr(tuple(prompt)).encode()).hexdigest()[:16]


@cache
def kept() -> Mapping[str, list[int]]:
    return {key: answer for file in (FILE, OF_OTHERS) for key, answer in json.loads(file.read_text("utf-8")).items()}


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


def _write(file: Path, answers: Mapping[str, Sequence[int]]) -> None:
    rows = ",\n".join(f'"{key}": {json.dumps(answer)}' for key, answer in answers.items())
    file.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")


def main() -> None:
    from tests.real_models.conftest import TOKENS, opened
    from tests.real_models.test_answers import LENGTHS, long_prompt

    with opened() as real:
        prompts = [*real.prompts, *(long_prompt(real, length) for length in LENGTHS)]
        _write(FILE, {key_of(prompt): answer_of(real.reference, prompt, TOKENS) for prompt in prompts})


def of_others() -> None:
    """Write the answers of the other model, and the tokens of a text as an entry without an answer."""
    from alignedserve.architectures.model_source import cache_directory, resolve
    from alignedserve.text.text_model import TextModel
    from tests.real_models.others import GEMMA
    from tests.real_models.test_others import ANSWER, prompts_of, reference, their_tokens

    file = GEMMA.find(cache_directory(None))
    assert file is not None, f"python -m tests.real_models.others {GEMMA.name} fetches it"
    with TemporaryDirectory() as scratch:
        prompts = prompts_of(TextModel.load(resolve(str(file), scratch)))
    answers = {key_of(prompt): answer_of(reference(file), prompt, ANSWER) for prompt in prompts}
    _write(OF_OTHERS, {key_of(their_tokens(file)): [], **answers})


if __name__ == "__main__":
    of_others() if "--others" in sys.argv else main()
