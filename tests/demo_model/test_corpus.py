"""Tests that the corpus is right, by rules written here a second time, and that its two sides share only what they
may."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest

from demo_corpus import KINDS, Draw, Sample, Split, sample
from demo_corpus.counting import counted
from demo_corpus.document_tasks import MOST_FURTHER, NOT_GIVEN
from demo_corpus.documents import Size, document, layouts
from demo_corpus.lists import HELD_OUT_LENGTHS, THINGS
from demo_corpus.phrasing import NUMBER_WORDS
from demo_corpus.sample import split_of
from demo_corpus.spelling import word_to_spell
from demo_corpus.stories import LONG, LONGEST, MIDDLING, PLACES, SHORT, TOPICS, Plot
from demo_corpus.sums import worked
from demo_corpus.vocabulary import firm, first_name, surname, town

SIDES = pytest.mark.parametrize("split", list(Split))
DOCUMENT_KINDS = ("extract_lines", "extract_json", "summary_one", "summary_five", "classify")
DOCUMENT_TYPES = {"letter", "invoice", "order", "report"}


def drawn(kind: str, split: Split, many: int) -> list[Sample]:
    return [sample(Draw(f"test/{number}", split), kind) for number in range(many)]


def numbers_in(text: str) -> list[int]:
    """Return the numbers of a request, digits or words, in their order."""
    found = re.findall(rf"\d+|\b(?:{'|'.join(NUMBER_WORDS)})\b", text.lower())
    return [int(value) if value.isdigit() else NUMBER_WORDS.index(value) for value in found]


def test_one_seed_makes_one_conversation(many: int) -> None:
    for number in range(many):
        assert sample(Draw(number, Split.TRAIN)) == sample(Draw(number, Split.TRAIN))


@SIDES
def test_every_kind_is_drawn(split: Split, many: int) -> None:
    assert {sample(Draw(number, split)).kind for number in range(many)} == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_one_conversation_has_one_answer(kind: str, many: int) -> None:
    answers: dict[str, set[str]] = defaultdict(set)
    for split in Split:
        for conversation in drawn(kind, split, many):
            answers[json.dumps(conversation.messages)].add(conversation.answer)
    assert [asked for asked, given in answers.items() if len(given) > 1] == []


@pytest.mark.parametrize("kind", KINDS)
def test_no_conversation_is_on_both_sides(kind: str, many: int) -> None:
    sides = {split: {sample.turns for sample in drawn(kind, split, many)} for split in Split}
    assert not sides[Split.TRAIN] & sides[Split.HELD_OUT]


@pytest.mark.parametrize("value", [first_name, surname, town, firm, word_to_spell])
def test_held_out_values_never_occur_in_training(value: Callable[[Draw], str], many: int) -> None:
    train, held_out = ({value(Draw(number, split)) for number in range(many)} for split in Split)
    assert not train & held_out


def test_held_out_words_to_spell_occur_nowhere_in_training(many: int) -> None:
    words = {word_to_spell(Draw(number, Split.HELD_OUT)) for number in range(many)}
    seen: set[str] = set()
    for number in range(10 * many):
        for turn in sample(Draw(number, Split.TRAIN)).turns:
            seen.update(re.findall(r"[a-z]+", f"{turn.user} {turn.assistant}".lower()))
    assert not words & seen


def test_document_layouts_are_of_one_side(many: int) -> None:
    for split in Split:
        used = {document(Draw(number, split), Size.SHORT).layout for number in range(many)}
        assert used <= set(layouts(split))
    train, held_out = (set(layouts(split)) for split in Split)
    assert not train & held_out
    assert len(held_out) >= 12


def test_list_lengths_are_of_one_side(many: int) -> None:
    asked = {split: {sample.asked for sample in drawn("list", split, many)} for split in Split}
    assert asked[Split.HELD_OUT] == set(HELD_OUT_LENGTHS)
    assert not asked[Split.TRAIN] & asked[Split.HELD_OUT]


@SIDES
def test_counts_follow_their_request(split: Split, many: int) -> None:
    for kind in ("count_up", "count_down", "count_steps"):
        for conversation in drawn(kind, split, many):
            first, *rest = [int(number) for number in conversation.answer.split(", ")]
            asked = numbers_in(conversation.turns[-1].user)
            if kind == "count_steps":
                step = asked.pop(0 if re.search("steps of .* from", conversation.turns[-1].user.lower()) else -1)
            else:
                step = -1 if kind == "count_down" else 1
            start, end = asked if len(asked) == 2 else (1, asked[0])
            assert first == start
            assert all(after - before == step for before, after in pairwise([first, *rest]))
            last = rest[-1] if rest else first
            assert 0 <= (end - last) / step < 1
            assert conversation.asked == 1 + len(rest)


@pytest.mark.parametrize(
    ("first", "last", "step", "text"),
    [(3, 5, 1, "3, 4, 5"), (5, 3, -1, "5, 4, 3"), (0, 10, 4, "0, 4, 8"), (7, 7, 1, "7")],
)
def test_counted(first: int, last: int, step: int, text: str) -> None:
    assert counted(first, last, step) == text


@SIDES
def test_every_step_of_a_sum_is_true(split: Split, many: int) -> None:
    for conversation in drawn("sum", split, many):
        for left, right in re.findall(r"([\d +\-x]+) = (\d+)", conversation.answer):
            assert eval(left.replace("x", "*")) == int(right), conversation.answer
        result = int(conversation.answer.removesuffix(".").rpartition("= ")[2])
        asked, signs = numbers_in(conversation.turns[-1].user), conversation.answer.rpartition("So ")[2]
        a, b = reversed(asked) if re.search("(?i)subtract .* from|take .* away", conversation.turns[-1].user) else asked
        expected = {"+": a + b, "-": a - b, "x": a * b}[next(sign for sign in "+-x" if f" {sign} " in signs)]
        assert result == expected


@pytest.mark.parametrize(
    ("a", "sign", "b", "text"),
    [
        (8, "-", 4, "8 - 4 = 4."),
        (47, "+", 38, "7 + 8 = 15, write 5, carry 1. 4 + 3 + 1 = 8. So 47 + 38 = 85."),
        (116, "-", 4, "6 - 4 = 2. 1 stays 1. 1 stays 1. So 116 - 4 = 112."),
        (100, "-", 99, "10 - 9 = 1, borrow 1. 10 - 9 - 1 = 0, borrow 1. 1 - 1 = 0. So 100 - 99 = 1."),
        (24, "x", 3, "20 x 3 = 60. 4 x 3 = 12. 60 + 12 = 72. So 24 x 3 = 72."),
    ],
)
def test_worked_sums(a: int, sign: str, b: int, text: str) -> None:
    assert worked(a, sign, b) == text


@SIDES
def test_spelling_gives_the_letters_of_the_word_asked_for(split: Split, many: int) -> None:
    for conversation in drawn("spell", split, many):
        assert conversation.answer.replace(" ", "") in re.findall(r"[a-z]+", conversation.turns[-1].user.lower())
        assert all(len(letter) == 1 for letter in conversation.answer.split(" "))


@SIDES
def test_lists_have_as_many_different_things_of_the_kind_as_asked(split: Split, many: int) -> None:
    for conversation in drawn("list", split, many):
        marks, items = zip(*(line.split(". ") for line in conversation.answer.splitlines()), strict=True)
        (n,) = numbers_in(conversation.turns[-1].user)
        assert [int(mark) for mark in marks] == list(range(1, n + 1))
        assert len(set(items)) == n
        assert any(set(items) <= set(things) for things in THINGS.values())


@SIDES
def test_stories_have_their_people_and_their_length(split: Split, many: int) -> None:
    for conversation in drawn("story", split, many):
        assert conversation.answer.count(".") == conversation.asked
        question = conversation.turns[-1].user
        topic = next((topic for topic in TOPICS if topic in question), None)
        asked_for = set(re.findall(r"\b[A-Z][a-z]+\b", question[1:]))
        assert asked_for <= set(re.findall(r"\w+", conversation.answer))
        assert topic is None or topic.split()[-1] in conversation.answer
        size = re.search(r"(short|brief|little|long|a) story(?! (in|of|with) )", question)
        if size:
            assert conversation.asked == {"long": LONG, "a": MIDDLING}.get(size[1], SHORT)


def test_a_story_makes_sense_wherever_it_is_cut() -> None:
    """The opening comes first, the topic second and its ending last, at every length."""
    for place in (*PLACES, "Ashford"):
        for topic in TOPICS:
            whole = Plot(("Ann",), place, topic, LONGEST).tell().split(". ")
            for sentences in range(3, LONGEST + 1):
                told = Plot(("Ann",), place, topic, sentences).tell().split(". ")
                assert len(told) == sentences
                assert told[:-1] == whole[: sentences - 1]
                assert told[-1] == whole[-1]


@SIDES
def test_document_answers_are_facts_of_the_document(split: Split, many: int) -> None:
    for kind in ("extract_lines", "extract_json"):
        for conversation in drawn(kind, split, many):
            asked, answer = conversation.turns[0].user, conversation.turns[0].assistant
            fields = json.loads(answer) if kind == "extract_json" else _fields(answer)
            assert len(fields) == conversation.asked
            assert all(field in asked for field in fields)
            assert all(value in asked or value == NOT_GIVEN for value in fields.values())


def _fields(lines: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in lines.splitlines())


@SIDES
def test_a_fact_stands_verbatim_in_its_document(split: Split, many: int) -> None:
    for size in Size:
        for number in range(many // 3):
            told = document(Draw(number, split), size)
            assert all(value in told.text for value in told.facts.values())
            assert told.text.isascii()


@SIDES
def test_summaries_have_one_or_five_sentences(split: Split, many: int) -> None:
    for kind, sentences in (("summary_one", 1), ("summary_five", 5)):
        for conversation in drawn(kind, split, many):
            answer = conversation.turns[0].assistant
            assert len(re.split(r"\.(?: (?=[A-Z])|$)", answer)) - 1 == sentences, answer


@SIDES
def test_documents_are_classified_in_one_word(split: Split, many: int) -> None:
    assert {sample.turns[0].assistant for sample in drawn("classify", split, many)} == DOCUMENT_TYPES


@pytest.mark.parametrize("kind", DOCUMENT_KINDS)
def test_only_training_goes_on_about_a_document(kind: str, many: int) -> None:
    turns = {split: {len(sample.turns) for sample in drawn(kind, split, many)} for split in Split}
    assert turns == {Split.TRAIN: set(range(1, MOST_FURTHER + 2)), Split.HELD_OUT: {1}}


@pytest.mark.parametrize("kind", DOCUMENT_KINDS)
def test_further_answers_are_about_the_same_document(kind: str, many: int) -> None:
    for conversation in drawn(kind, Split.TRAIN, many):
        first, *further = conversation.turns
        for turn in further:
            assert all(fact in first.user for fact in _facts(turn.assistant)), turn
        assert len(set().union(*(_types(turn.assistant) for turn in conversation.turns))) <= 1


def _facts(answer: str) -> list[str]:
    """Return what an answer tells of its document: the values given, or the names, numbers and dates of a summary."""
    if answer in DOCUMENT_TYPES:
        return []
    if answer.startswith("This is "):
        told = re.findall(r"\b[A-Z\d](?:[\w.,-]*\w)?", answer)
        return [word for word in told if word not in ("This", "It", "An", "The", "Delivery")]
    fields = json.loads(answer) if answer.startswith("{") else _fields(answer)
    return [value for value in fields.values() if value != NOT_GIVEN]


def _types(answer: str) -> set[str]:
    """Return the type of document that an answer names, if the answer is that one word or a summary."""
    if answer in DOCUMENT_TYPES:
        return {answer}
    return set(re.findall(r"^This is (?:an? )?(\w+)", answer))


@SIDES
def test_dialogues_use_their_earlier_turns(split: Split, many: int) -> None:
    dialogues = drawn("multi_turn", split, many)
    assert all(len(sample.turns) >= 2 for sample in dialogues)
    for conversation in dialogues:
        if conversation.answer.startswith("Your name is "):
            name = conversation.answer.removeprefix("Your name is ").rstrip(".")
            assert name in conversation.turns[0].user


def test_fresh_says_what_it_could_not_find() -> None:
    draw = Draw(1, Split.HELD_OUT)
    trained = next(n for n in range(100) if split_of(n) is Split.TRAIN)
    with pytest.raises(ValueError, match=f"no held_out value in 1000 tries, the last was {trained}"):
        draw.fresh(partial(int, trained))
