"""Tests that reasoning ends with its budget, that a syntax holds for the answer alone, and that being moved changes
nothing, whatever the logits."""

from __future__ import annotations

import re
from itertools import product

import pytest
import torch

from alignedserve.core import Choice, History, Reasoning, Sampling
from alignedserve.engine.sampling.sampling import NextToken, Sampler
from alignedserve.errors import PlanError
from alignedserve.text.reasoning.families import FAMILIES
from alignedserve.text.syntax import Syntaxes, regex_syntax
from alignedserve.text.text_model import TextModel
from tests.end_to_end.deployment import MODEL
from tests.engine.test_syntax import MOST, STOP, sampled
from tests.rare import thinned

DIGITS = "[0-9]{1,6}"
A_DIGIT = regex_syntax("[0-9]")


@pytest.fixture(scope="module")
def text() -> TextModel:
    return TextModel.load(MODEL)


@pytest.fixture(scope="module")
def syntaxes() -> Syntaxes:
    return Syntaxes(MODEL)


def reasoning(text: TextModel, family: str, inside: bool, most: int | None) -> Reasoning:
    of = FAMILIES[family]
    opening = () if inside else tuple(text.answer_ids(of.starts[0]))
    closing = [token for token in text.answer_ids(of.closing) if token != STOP]  # harmony's end is this model's too
    return Reasoning(family, inside, opening, tuple(closing), most)


@pytest.mark.parametrize(
    ("family", "most"), thinned(product(("qwen3", "granite", "openai_gptoss", "mistral"), (0, 17)), usual=3)
)
def test_a_budget_is_kept_and_the_answer_follows_its_syntax(
    text: TextModel, syntaxes: Syntaxes, family: str, most: int
) -> None:
    limited = reasoning(text, family, True, most)
    for seed in range(1):
        sampling = Sampling(1.0, seed=seed, syntax=regex_syntax(DIGITS), reasoning=limited)
        output = sampled(sampling, syntaxes, text.vocab_size)
        answer = most + len(limited.closing)
        assert tuple(output[most:answer]) == limited.closing
        assert STOP not in output[:answer], "the reasoning does not end the output"
        assert output[-1] == STOP
        assert text.decode(output[answer:-1]).isdigit()
        for moved_at in (range(1, MOST, 3), (most + 1, answer)):
            assert sampled(sampling, syntaxes, text.vocab_size, moved_at) == output
        assert sampled(sampling, syntaxes, text.vocab_size, early=True) == output


def test_the_syntax_of_an_answer_is_compiled_once(text: TextModel, syntaxes: Syntaxes, compiled: list[str]) -> None:
    limited = Sampling(1.0, seed=1, syntax=A_DIGIT, reasoning=reasoning(text, "qwen3", True, 5))
    sampled(limited, syntaxes, text.vocab_size)
    assert compiled == [A_DIGIT]


def test_without_a_syntax_only_the_closing_is_forced(text: TextModel, syntaxes: Syntaxes) -> None:
    limited, free = reasoning(text, "qwen3", True, 9), Sampling(1.0, seed=5, min_tokens=30)
    alone = sampled(free, syntaxes, text.vocab_size)
    output = sampled(Sampling(1.0, seed=5, min_tokens=30, reasoning=limited), syntaxes, text.vocab_size)
    answer = 9 + len(limited.closing)
    assert tuple(output[9:answer]) == limited.closing
    assert (output[:9], output[answer:]) == (alone[:9], alone[answer:]), "all else is as the logits have it"


def leading(text: TextModel, syntaxes: Syntaxes, sampling: Sampling, written: str) -> tuple[bool, set[int]]:
    """Return whether the sampler allows each token of this output, and what it allows after it."""
    ids, output = text.answer_ids(written), list[int]()
    sampler, history = Sampler(text.vocab_size, syntaxes), History((5,), output, (STOP,))
    logits, follows = torch.zeros(1, text.vocab_size), True
    for place in range(len(ids) + 1):
        logits = torch.zeros(1, text.vocab_size)
        sampler.sample(logits, [NextToken(sampling, place, "r", history, output[-1] if output else None)])
        if place < len(ids):
            follows &= bool(torch.isfinite(logits[0, ids[place]]))
            output.append(ids[place])
    return follows, set(torch.isfinite(logits[0]).nonzero().flatten().tolist())


@pytest.mark.parametrize("form", ["syntax", "choice"])
def test_an_output_may_reason_or_answer_at_once(text: TextModel, syntaxes: Syntaxes, form: str) -> None:
    said = (tuple(text.answer_ids("yes")), tuple(text.answer_ids("no")))
    forms = {"syntax": Sampling(syntax=regex_syntax("yes|no")), "choice": Sampling(grammar=Choice(said))}
    limits = forms[form]
    sampling = Sampling(syntax=limits.syntax, grammar=limits.grammar, reasoning=reasoning(text, "qwen3", False, None))
    for written in ("yes", "<think>Hm, no, yes! 7</think>no", "<think></think>yes"):
        follows, next_tokens = leading(text, syntaxes, sampling, written)
        assert follows, written
        assert next_tokens == {STOP}, written
    for broken in ("maybe", "<think></think>maybe", "<thought>"):
        assert not leading(text, syntaxes, sampling, broken)[0]
    _, inside = leading(text, syntaxes, sampling, "<think>Hm")
    assert inside == {*range(text.vocab_size)} - {STOP}


def test_a_message_aside_is_not_cut(text: TextModel, syntaxes: Syntaxes) -> None:
    """A call in harmony's commentary is no reasoning: neither a budget nor a syntax touches it."""
    sampling = Sampling(reasoning=reasoning(text, "openai_gptoss", False, 40))
    written = "<|channel|>commentary to=functions.f<|message|>" + "1, " * 40
    assert len(leading(text, syntaxes, sampling, written)[1]) == text.vocab_size


def test_without_a_tokenizer_there_is_none() -> None:
    sampling = Sampling(reasoning=Reasoning("qwen3", True, (), (5,), 1))
    wanted = [NextToken(sampling, 0, "r", History((5,), [], (STOP,)))]
    with pytest.raises(PlanError, match=r"tokenizer\.json"):
        Sampler(64).sample(torch.zeros(1, 64), wanted)


def test_a_budget_counts_what_comes_after_the_opening_and_no_answer(text: TextModel, syntaxes: Syntaxes) -> None:
    limited = reasoning(text, "qwen3", False, 2)
    for written, is_forced in (("<think>", False), ("<think>1", False), ("<think>12", True), ("123456", False)):
        _, allowed = leading(text, syntaxes, Sampling(reasoning=limited), written)
        assert (allowed == {limited.closing[0]}) is is_forced
    assert len(leading(text, syntaxes, Sampling(reasoning=limited), "<think>12</think>" + "3" * 9)[1]) > 1


def test_a_grammar_that_has_begun_holds_to_the_end(text: TextModel, syntaxes: Syntaxes) -> None:
    """Even where an answer has markers in it, as calls in harmony's form have."""
    call = "<|channel|>commentary to=f<|message|>7"
    pattern = re.escape(call) + "|8<think>9"
    for family, written in (
        ("openai_gptoss", f"<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>{call}"),
        ("qwen3", "<think>Hm</think>8<think>9"),
    ):
        sampling = Sampling(syntax=regex_syntax(pattern), reasoning=reasoning(text, family, False, 50))
        assert leading(text, syntaxes, sampling, written) == (True, {STOP})
