"""Tests that output sampled under a syntax follows it, whatever the logits, and wherever another worker continues
it."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from string import ascii_letters
from typing import Any

import jsonschema
import pytest
import torch

from alignedserve.core import Chunk, History, KvForm, Sampling, StepPlan
from alignedserve.engine.engine import Engine
from alignedserve.engine.sampling.reading import make_result
from alignedserve.engine.sampling.sampling import NextToken, Sampler
from alignedserve.errors import PlanError
from alignedserve.gateway.access.keys import KeyEntry, hash_key
from alignedserve.text.syntax import Syntaxes, json_syntax, lark_syntax, regex_syntax
from alignedserve.text.text_model import TextModel
from tests.end_to_end.deployment import MODEL
from tests.rare import rarely
from tests.samples import request as request_of
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


def test_what_is_followed_for_a_step_is_not_followed_again_behind_its_pauses(
    syntaxes: Syntaxes, text: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed, follow = list[str](), Sampler._follow

    def noted(sampler: Sampler, wanted: Sequence[NextToken]) -> Any:
        followed.append(wanted[0].request)
        return follow(sampler, wanted)

    monkeypatch.setattr(Sampler, "_follow", noted)
    sampler, syntax = Sampler(text.vocab_size, syntaxes), regex_syntax("[a-z]+")
    wanted, *amid = [
        [NextToken(Sampling(syntax=syntax), 0, name, History((5,), [], (STOP,)))] for name in ("document", "a", "b")
    ]
    sampler.begin(wanted)
    for chat in amid:
        sampler.begin(chat)
        sampler.sample(torch.zeros(1, text.vocab_size), chat)
    sampler.sample(torch.zeros(1, text.vocab_size), wanted)
    assert followed == ["document", "a", "b"]


def test_what_is_whole_is_valid(text: TextModel, syntaxes: Syntaxes) -> None:
    ended = 0
    for number in range(10):
        wanted = schema(Random(number))
        output = said(json_syntax(wanted), syntaxes, text.vocab_size, number)
        if output[-1] == STOP:
            jsonschema.validate(json.loads(text.decode(output[:-1])), wanted)
            ended += 1
    assert ended > 2


def test_it_does_not_depend_on_being_moved_or_begun_early(text: TextModel, syntaxes: Syntaxes) -> None:
    for number in range(2):
        syntax = json_syntax(schema(Random(number)))
        alone = said(syntax, syntaxes, text.vocab_size, number)
        assert said(syntax, syntaxes, text.vocab_size, number, moved_at=range(1, MOST, 3)) == alone
        assert said(syntax, syntaxes, text.vocab_size, number, early=True) == alone


AN_A, A_B = lark_syntax('start: "a" "c"'), lark_syntax('start: "b" "c"')


class Preparing:
    """A sampler that prepares syntaxes, and waits for them."""

    def __init__(self, text: TextModel) -> None:
        self.sampler, self._vocab_size = Sampler(text.vocab_size, Syntaxes(MODEL)), text.vocab_size
        self._held, self._ready = threading.Event(), threading.Semaphore(0)
        self._num_ordered = 0

    def hold(self) -> None:
        """Have the preparing stand after a syntax of the caller "a", until all that is ordered next is there."""
        began = threading.Event()

        def stand() -> None:
            began.set()
            self._held.wait(60)

        self.sampler.prepare(Sampling(), "a", stand)
        assert began.wait(60)

    def order(self, sampling: Sampling, caller: str = "a") -> None:
        self.sampler.prepare(sampling, caller, self._ready.release)
        self._num_ordered += 1

    def finish(self) -> None:
        self._held.set()
        while self._num_ordered:
            assert self._ready.acquire(timeout=60)
            self._num_ordered -= 1

    def first_token(self, sampling: Sampling, request: str) -> int | None:
        wanted = NextToken(sampling, 0, request, History((5,), [], (STOP,)))
        (chosen,) = self.sampler.sample(torch.zeros(1, self._vocab_size), [wanted])
        return chosen.token


def test_choices_of_one_body_compile_their_syntax_once(text: TextModel, compiled: list[str]) -> None:
    preparing, choices = Preparing(text), [Sampling(syntax=AN_A, seed=seed) for seed in range(32)]
    for choice in choices:
        preparing.order(choice)
    preparing.finish()
    for number, choice in enumerate(choices):
        token = preparing.first_token(choice, str(number))
        assert token is not None
        assert "ac".startswith(text.decode([token])), "none goes on where another is"
    assert compiled == [AN_A]


def test_however_many_wait_none_is_compiled_in_a_step(text: TextModel, compiled: list[str]) -> None:
    preparing = Preparing(text)
    lines = [Sampling(syntax=f"start: /a{{1,{number + 1}}}/") for number in range(80)]
    for line in lines:
        preparing.order(line)
    preparing.finish()
    assert compiled == [line.syntax for line in lines]
    assert all(preparing.first_token(line, str(number)) is not None for number, line in enumerate(lines))
    assert len(compiled) == 80


def test_a_request_that_sat_out_long_is_not_compiled_again(text: TextModel, compiled: list[str]) -> None:
    preparing, one, other = Preparing(text), Sampling(syntax=AN_A), Sampling(syntax=A_B)
    preparing.order(one)
    preparing.finish()
    first = preparing.first_token(one, "r")
    for _ in range(3):
        preparing.first_token(other, "s")
    assert preparing.first_token(one, "r") == first
    assert compiled == [AN_A, A_B]


def test_who_hangs_up_leaves_nothing(text: TextModel, compiled: list[str]) -> None:
    preparing, gone = Preparing(text), Sampling(syntax=AN_A)
    preparing.order(gone)
    preparing.finish()
    del gone
    preparing.order(later := Sampling(syntax=AN_A))
    preparing.finish()
    assert compiled == [AN_A, AN_A], "nothing was kept for nobody"
    assert preparing.first_token(later, "r") is not None


def test_what_nobody_waits_for_any_more_is_not_compiled(text: TextModel, compiled: list[str]) -> None:
    preparing, gone = Preparing(text), Sampling(syntax=AN_A)
    preparing.hold()
    preparing.order(gone)
    preparing.order(here := Sampling(syntax=A_B))
    del gone
    compiled.clear()
    preparing.finish()
    assert compiled == [here.syntax]


def test_a_caller_waits_for_one_syntax_of_another_at_most(text: TextModel, compiled: list[str]) -> None:
    preparing = Preparing(text)
    of_a = [Sampling(syntax=f"start: /a{{1,{number + 1}}}/") for number in range(8)]
    of_b = [Sampling(syntax=f"start: /b{{1,{number + 1}}}/") for number in range(2)]
    preparing.hold()  # of a, too
    for sampling in of_a:
        preparing.order(sampling, "a")
    for sampling in of_b:
        preparing.order(sampling, "b")
    compiled.clear()
    preparing.finish()
    in_turns = [of_b[0], of_a[0], of_b[1], *of_a[1:]]
    assert compiled == [sampling.syntax for sampling in in_turns]


def test_a_key_is_one_caller_whatever_salt_it_chooses() -> None:
    mine, other = (KeyEntry(name, hash_key(name)).caller for name in ("mine", "other"))
    callers = [replace(request_of("r"), salt=salt).caller for salt in (mine.salt_with("x"), mine.salt_with("y"))]
    assert callers == [mine.salt, mine.salt]
    assert replace(request_of("r"), salt=other.salt_with(None)).caller != mine.salt


def test_a_request_that_sits_out_a_step_keeps_its_syntax(
    text: TextModel, syntaxes: Syntaxes, compiled: list[str]
) -> None:
    sampler, output = Sampler(text.vocab_size, syntaxes), list[int]()
    histories = {"r": History((5,), output, (STOP,)), "s": History((5,), [], (STOP,))}
    for index, request in ((0, "r"), (0, "s"), (1, "r")):
        wanted = NextToken(Sampling(syntax=AN_A if request == "r" else A_B), index, request, histories[request])
        (chosen,) = sampler.sample(torch.zeros(1, text.vocab_size), [wanted])
        assert chosen.token is not None
        if request == "r":
            output.append(chosen.token)
    assert compiled == [AN_A, A_B]
    assert text.decode([token for token in output if token != STOP]) == "ac"


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


TOO_LARGE = [
    regex_syntax("b(a{1000}){1000}"),
    regex_syntax("xxxx(a{1000}){1000}"),  # it shows with the second token
    json_syntax({"enum": ["v" * 90_000, 1]}),
]


@pytest.mark.parametrize("syntax", [*TOO_LARGE, rarely(regex_syntax("(a{1000}){1000}"))])
def test_a_syntax_that_is_too_large_is_known_before_it_is_followed(syntaxes: Syntaxes, syntax: str) -> None:
    why = syntaxes.find_fault(syntax)
    assert why
    assert "<state>" not in why, "a word of what is wrong, not all that the library knows"


@pytest.mark.parametrize("pattern", ["(a{300}){300}", "x{3}(a{300}){300}"])
def test_a_pattern_whose_masks_are_slow_is_refused(syntaxes: Syntaxes, pattern: str) -> None:
    assert syntaxes.find_fault(regex_syntax(pattern)) == (
        "to find what may come next takes more than 2 ms for each token: make it smaller"
    )


@pytest.mark.parametrize(
    "syntax", [regex_syntax(""), regex_syntax("a*"), regex_syntax(".{20000}"), json_syntax({"enum": ["v" * 1000, 1]})]
)
def test_large_and_empty_patterns_can_be_followed(syntaxes: Syntaxes, syntax: str) -> None:
    assert syntaxes.find_fault(syntax) is None


@pytest.mark.parametrize("length", [4, *map(rarely, (8, 16, 200))])
def test_the_longest_enum_can_be_followed(text: TextModel, syntaxes: Syntaxes, length: int) -> None:
    """No mask of it takes more work than a mask may, though it is reached only after some tokens."""
    words = ["".join(Random(number).choices(ascii_letters, k=length)) for number in range(95_000 // (length + 4))]
    syntax = json_syntax({"type": "object", "properties": {"a": {"enum": words}}, "required": ["a"]}, "")
    for seed in range(2):
        output = said(syntax, syntaxes, text.vocab_size, seed)
        assert output[-1] == STOP or len(output) == MOST
        assert output[-1] != STOP or json.loads(text.decode(output[:-1]))["a"] in words


def test_a_vocabulary_may_be_larger_than_its_tokenizer(text: TextModel, syntaxes: Syntaxes) -> None:
    output = said(regex_syntax("[ab]{3}"), syntaxes, text.vocab_size + 100, 1)
    assert max(output) < text.vocab_size
    assert len(text.decode(output[:-1])) == 3


def test_the_engine_asks_it(text: TextModel) -> None:
    engine = Engine(MODEL, num_blocks=8)
    prompt = tuple(text.chat_ids([{"role": "user", "content": "Hello"}]))
    sampling = Sampling(syntax=regex_syntax("[0-9]{2}"))
    history = History(prompt, [], (STOP,))
    result = engine.step(StepPlan(1, (Chunk("r", prompt, 0, KvForm(tuple(range(8))), sampling, history=history),)))
    ((_, token),) = result.tokens
    assert text.decode([token]).isdigit()


def test_without_a_tokenizer_there_is_none() -> None:
    wanted = [NextToken(Sampling(syntax=regex_syntax("a")), 0, "r", History((5,), [], (STOP,)))]
    with pytest.raises(PlanError, match=r"tokenizer\.json"):
        Sampler(64).sample(torch.zeros(1, 64), wanted)


def test_a_step_tells_what_slow_masks_took_and_all_who_follow_a_syntax_share_the_first(
    text: TextModel, syntaxes: Syntaxes
) -> None:
    """The second token of (a{300}){300} takes 20 ms of a processor, that of (a|b)+ some microseconds."""
    sampler, took = Sampler(text.vocab_size, syntaxes), list[dict[str, float]]()
    requests = {"slow": "(a{300}){300}", "quick": "(a|b)+"}
    forms = {name: Sampling(syntax=regex_syntax(pattern)) for name, pattern in requests.items()}
    for sampling in forms.values():
        syntaxes.prepare(sampling.syntax, sampling)
    outputs: dict[str, list[int]] = {name: [] for name in forms}
    for index in range(2):
        wanted = [
            NextToken(form, index, name, History((5,), outputs[name], (STOP,)), next(iter(outputs[name]), None))
            for name, form in forms.items()
        ]
        sampled_now = sampler.sample(torch.zeros(2, text.vocab_size), wanted)
        result = make_result(index, [*forms], sampled_now)
        for name, token in result.tokens:
            outputs[name].append(token)
        took.append(dict(result.masks))
    assert took[0].get("slow", 0.0) < took[1]["slow"] / 5, "the first is kept with the syntax"
    assert took[1].get("quick", 0.0) < took[1]["slow"] / 5
