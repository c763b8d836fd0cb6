"""Tests that output sampled under a syntax follows it, whatever the logits, and wherever another worker continues
it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from string import ascii_letters

import jsonschema
import pytest
import torch

from alignedserve.core import Chunk, History, Sampling, StepPlan
from alignedserve.engine.engine import Engine
from alignedserve.engine.sampling.sampling import NextToken, Sampler
from alignedserve.errors import PlanError
from alignedserve.text.syntax import Syntaxes, json_syntax, lark_syntax, regex_syntax
from alignedserve.text.text_model import TextModel
from tests.conftest import SOAK
from tests.end_to_end.deployment import MODEL
from tests.schemas import schema

STOP = 2
MOST = 160  # tokens of an output


@pytest.fixture(scope="module")
def text() -> TextModel:
    return TextModel.load(MODEL)


@pytest.fixture(scope="module")
def syntaxes() -> Syntaxes:
    return Syntaxes(MODEL)


def said(
    syntax: str, syntaxes: Syntaxes, vocab_size: int, seed: int, moved_at: Sequence[int] = (), early: bool = False
) -> list[int]:
    return sampled(Sampling(1.0, seed=seed, syntax=syntax), syntaxes, vocab_size, moved_at, early)


def sampled(
    sampling: Sampling, syntaxes: Syntaxes, vocab_size: int, moved_at: Sequence[int] = (), early: bool = False
) -> list[int]:
    """Sample from random logits; at each index in `moved_at` another worker continues.
    `early`: the sampler begins its work on the syntax before the logits are there."""
    output: list[int] = []
    sampler, history = Sampler(vocab_size, syntaxes), History((5,), output, (STOP,))
    while len(output) < MOST and (not output or output[-1] != STOP):
        if len(output) in moved_at:
            output = [*output]
            sampler, history = Sampler(vocab_size, syntaxes), History((5,), output, (STOP,))
        noise = torch.Generator().manual_seed(1000 * sampling.seed + len(output))
        logits = 2 * torch.randn(1, vocab_size, generator=noise)
        logits[0, STOP] += 4
        wanted = [NextToken(sampling, len(output), "r", history, output[-1] if output else None)]
        if early:
            sampler.begin(wanted)
        (chosen,) = sampler.sample(logits, wanted)
        assert chosen.token is not None
        output.append(chosen.token)
    return output


def test_what_is_whole_is_valid(text: TextModel, syntaxes: Syntaxes) -> None:
    ended = 0
    for number in range(300 if SOAK else 25):
        wanted = schema(Random(number))
        output = said(json_syntax(wanted), syntaxes, text.vocab_size, number)
        if output[-1] == STOP:
            jsonschema.validate(json.loads(text.decode(output[:-1])), wanted)
            ended += 1
    assert ended > 5


def test_it_does_not_depend_on_being_moved_or_begun_early(text: TextModel, syntaxes: Syntaxes) -> None:
    for number in range(6):
        syntax = json_syntax(schema(Random(number)))
        alone = said(syntax, syntaxes, text.vocab_size, number)
        assert said(syntax, syntaxes, text.vocab_size, number, moved_at=range(1, MOST, 3)) == alone
        assert said(syntax, syntaxes, text.vocab_size, number, early=True) == alone


@pytest.mark.parametrize(
    ("syntax", "possible"),
    [
        (regex_syntax("ab?c"), {"abc", "ac"}),
        (lark_syntax('start: "yes" | "no"'), {"yes", "no"}),
        (json_syntax({"enum": ["a", 1, None]}), {'"a"', "1", "null"}),
        (json_syntax({"type": "array", "maxItems": 0}, ""), {"[]"}),
    ],
)
def test_it_ends_where_it_may(text: TextModel, syntaxes: Syntaxes, syntax: str, possible: set[str]) -> None:
    outputs = [said(syntax, syntaxes, text.vocab_size, seed) for seed in range(12)]
    assert all(output[-1] == STOP for output in outputs)
    assert {text.decode(output[:-1]) for output in outputs} == possible


def test_what_no_text_follows_has_no_token(syntaxes: Syntaxes) -> None:
    """The same holds for a mask that would take too long: the request ends alone, and nothing breaks."""
    wanted = [NextToken(Sampling(syntax="no syntax at all"), 0, "r", History((5,), [], (STOP,)))]
    (chosen,) = Sampler(2048, syntaxes).sample(torch.zeros(1, 2048), wanted)
    assert chosen.token is None
    assert syntaxes.find_fault("no syntax at all")


@pytest.mark.parametrize("pattern", ["(a{1000}){1000}", "b(a{1000}){1000}"])
def test_a_pattern_that_is_too_large_is_known_before_it_is_followed(syntaxes: Syntaxes, pattern: str) -> None:
    why = syntaxes.find_fault(regex_syntax(pattern))
    assert why
    assert "<state>" not in why, "a word of what is wrong, not all that the library knows"


@pytest.mark.parametrize(
    "syntax", [regex_syntax(""), regex_syntax("a*"), regex_syntax(".{20000}"), json_syntax({"enum": ["v" * 90_000, 1]})]
)
def test_large_and_empty_patterns_can_be_followed(syntaxes: Syntaxes, syntax: str) -> None:
    assert syntaxes.find_fault(syntax) is None


@pytest.mark.parametrize("length", [4, 8, 16, 200])
def test_the_longest_enum_can_be_followed(text: TextModel, syntaxes: Syntaxes, length: int) -> None:
    """No mask of it takes more work than a mask may, though it is reached only after some tokens."""
    words = ["".join(Random(number).choices(ascii_letters, k=length)) for number in range(95_000 // (length + 4))]
    syntax = json_syntax({"type": "object", "properties": {"a": {"enum": words}}, "required": ["a"]}, "")
    for seed in range(3):
        output = said(syntax, syntaxes, text.vocab_size, seed)
        assert output[-1] == STOP or len(output) == MOST
        assert output[-1] != STOP or json.loads(text.decode(output[:-1]))["a"] in words


def test_a_vocabulary_may_be_larger_than_its_tokenizer(text: TextModel, syntaxes: Syntaxes) -> None:
    output = said(regex_syntax("[ab]{3}"), syntaxes, text.vocab_size + 100, 1)
    assert max(output) < text.vocab_size
    assert len(text.decode(output[:-1])) == 3


def test_the_engine_asks_it(text: TextModel) -> None:
    engine = Engine(MODEL, num_pairs=8)
    prompt = tuple(text.chat_ids([{"role": "user", "content": "Hello"}]))
    sampling = Sampling(syntax=regex_syntax("[0-9]{2}"))
    history = History(prompt, [], (STOP,))
    result = engine.step(StepPlan(1, (Chunk("r", prompt, 0, tuple(range(8)), sampling, history=history),)))
    ((_, token),) = result.tokens
    assert text.decode([token]).isdigit()


def test_without_a_tokenizer_there_is_none() -> None:
    wanted = [NextToken(Sampling(syntax=regex_syntax("a")), 0, "r", History((5,), [], (STOP,)))]
    with pytest.raises(PlanError, match=r"tokenizer\.json"):
        Sampler(64).sample(torch.zeros(1, 64), wanted)
