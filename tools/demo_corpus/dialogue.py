"""Conversations of several turns, whose last question needs the turns before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from demo_corpus.counting import count_down, count_steps, count_up, counted, span
from demo_corpus.document_tasks import extraction, json_answer, lines_answer, pasted, picked_fields
from demo_corpus.documents import Size, document
from demo_corpus.lists import THINGS, list_length, list_order, list_things, listed, singular
from demo_corpus.phrasing import number, request
from demo_corpus.sample import Draw, Sample, Turn
from demo_corpus.smalltalk import smalltalk
from demo_corpus.spelling import spell, spelled, word_to_spell
from demo_corpus.stories import LONG, SHORT, people, plot, story_order, tell_story
from demo_corpus.sums import operands, sums, worked
from demo_corpus.unknown import unknown
from demo_corpus.vocabulary import first_name

KIND = "multi_turn"
_LONG_CHAT_CHARACTERS = 2600  # a counted number has four characters and three tokens: at most 1,950 tokens

_INTRODUCTIONS = ("My name is {n}.", "I am {n}.", "Hello, I am {n}.", "Hi, my name is {n}.", "Hi! I'm {n}.")
_NAME_QUESTIONS = (
    "What is my name?",
    "What's my name?",
    "Do you know my name?",
    "Do you remember my name?",
    "Who am I?",
    "Tell me my name.",
    "And what is my name?",
)
_ENDINGS = ("", ".", ", please.", "!")
_BACKWARDS = ("Now backwards", "And now backwards", "Now count back down", "The same backwards", "Now in reverse")
_ANOTHER_WORD = ("And {w}?", "And the word {w}?", "Now {w}.", "What about {w}?", "Now spell {w}.", "And now {w}.")
_ANOTHER_SUM = {
    "+": ("Now add {b}.", "And plus {b}?", "Add {b} to that.", "Plus {b}?"),
    "-": ("Now subtract {b}.", "And minus {b}?", "Take {b} away from that.", "Minus {b}?"),
}
_ANOTHER_KIND = ("And {n} {kind}?", "Now {n} {kind}.", "And {n} {kind}, please.", "The same with {n} {kind}.")
_FIRST_ITEM = ("What was the first one?", "Which one was first?", "Only the first one, please.")
_SHORTER = ("Make it shorter.", "Shorter, please.", "Now a short version.", "Can you make it shorter?")
_LONGER = ("Make it longer.", "Longer, please.", "Now a long version.", "Can you make it longer?")
_OTHER_PEOPLE = ("Now with {S} instead.", "The same with {S}.", "Now the same story with {S}.", "And with {S}?")
_ONE_FIELD = ("And the {f}?", "What about the {f}?", "Now the {f}.", "And what is the {f}?", "I also need the {f}.")
_AS_JSON = ("Now as JSON.", "The same as JSON, please.", "Give me that as JSON.", "Can I have it as JSON?")
_AS_LINES = ("Now as lines.", "The same as lines, please.", "Give me that as `field: value` lines.", "Not JSON, lines.")


def name_recall(draw: Draw) -> tuple[Turn, ...]:
    name = first_name(draw)
    introduction = draw.choose(_INTRODUCTIONS).format(n=name)
    between = [draw.choose((spell, sums, _plain_talk))(draw).turns[0] for _ in range(draw.integer(0, 2))]
    return (
        Turn(introduction, f"Nice to meet you, {name}!"),
        *between,
        Turn(draw.choose(_NAME_QUESTIONS), f"Your name is {name}."),
    )


def _plain_talk(draw: Draw) -> Sample:
    """Return small talk that introduces no other person."""
    while True:
        sample = smalltalk(draw)
        if not sample.answer.startswith(("Nice to meet you", "You have not told me")):
            return sample


def counting_on(draw: Draw) -> tuple[Turn, ...]:
    low, high = span(draw, longest=25)
    first = Turn(request(draw, f"Count from {number(draw, low)} to {number(draw, high)}"), counted(low, high))
    return first, Turn(draw.choose(_BACKWARDS) + draw.choose(_ENDINGS), counted(high, low, -1))


def spelling_on(draw: Draw) -> tuple[Turn, ...]:
    word = word_to_spell(draw)
    return spell(draw).turns[0], Turn(draw.choose(_ANOTHER_WORD).format(w=word), spelled(word))


def sums_on(draw: Draw) -> tuple[Turn, ...]:
    a, sign, b = operands(draw)
    first = worked(a, sign, b)
    result = int(first.removesuffix(".").rpartition("= ")[2])
    then = "+" if result < 20 or draw.chance(0.6) else "-"
    change = draw.fresh(lambda: draw.integer(1, 99 if then == "+" else min(99, result)))
    return (
        Turn(f"What is {a} {sign} {b}?", first),
        Turn(draw.choose(_ANOTHER_SUM[then]).format(b=number(draw, change)), worked(result, then, change)),
    )


def listing_on(draw: Draw) -> tuple[Turn, ...]:
    kind, n = draw.choose(tuple(THINGS)), list_length(draw)
    items = THINGS[kind]
    first = Turn(list_order(draw, kind, n), listed(items[:n]))
    if draw.chance(0.3):
        return first, Turn(draw.choose(_FIRST_ITEM), items[0])
    other, m = draw.choose(tuple(THINGS)), list_length(draw)
    order = draw.choose(_ANOTHER_KIND).format(n=number(draw, m), kind=other if m > 1 else singular(other))
    return first, Turn(order, listed(THINGS[other][:m]))


def story_again(draw: Draw) -> tuple[Turn, ...]:
    choice = draw.integer(1, 3)
    told = plot(draw, draw.integer(SHORT + 2, LONG) if choice == 1 else draw.integer(3, 8))
    first = Turn(story_order(draw, told), told.tell())
    if choice == 1:
        return first, Turn(draw.choose(_SHORTER), replace(told, sentences=SHORT).tell())
    if choice == 2:
        return first, Turn(draw.choose(_LONGER), replace(told, sentences=LONG).tell())
    others = people(draw)
    order = draw.choose(_OTHER_PEOPLE).format(S=" and ".join(others))
    return first, Turn(order, replace(told, people=others).tell())


def reading_on(draw: Draw) -> tuple[Turn, ...]:
    told = document(draw, draw.choose((Size.SHORT, Size.SHORT, Size.MEDIUM)))
    as_json = draw.chance(0.5)
    fields = picked_fields(draw, told, low=1, high=3)
    instruction, answer = extraction(draw, told, as_json, fields)
    first = Turn(pasted(instruction, told), answer)
    if draw.chance(0.4):
        again, form = (_AS_LINES, lines_answer) if as_json else (_AS_JSON, json_answer)
        return first, Turn(draw.choose(again), form(told, fields))
    field = draw.choose(sorted(set(told.facts) - set(fields)))
    return first, Turn(draw.choose(_ONE_FIELD).format(f=field), lines_answer(told, [field]))


def change_of_subject(draw: Draw) -> tuple[Turn, ...]:
    """Return requests that have nothing to do with each other: the last request counts."""
    makers = (smalltalk, unknown, spell, sums)
    return tuple(draw.choose(makers)(draw).turns[0] for _ in range(draw.integer(2, 4)))


def long_chat(draw: Draw) -> tuple[Turn, ...]:
    """Return many requests, up to about as many tokens as the model has positions."""
    makers = (smalltalk, unknown, spell, sums, count_up, count_down, count_steps, list_things, tell_story)
    turns: list[Turn] = []
    room = draw.integer(_LONG_CHAT_CHARACTERS // 2, _LONG_CHAT_CHARACTERS)
    while True:
        turn = draw.choose(makers)(draw).turns[0]
        room -= len(turn.user) + len(turn.assistant)
        if room < 0:
            return tuple(turns)
        turns.append(turn)


_DIALOGUES: dict[Callable[[Draw], tuple[Turn, ...]], int] = {
    name_recall: 4,
    counting_on: 4,
    spelling_on: 4,
    sums_on: 4,
    listing_on: 6,
    story_again: 4,
    reading_on: 6,
    change_of_subject: 4,
    long_chat: 2,
}


def multi_turn(draw: Draw) -> Sample:
    dialogue = draw.random.choices(list(_DIALOGUES), list(_DIALOGUES.values()))[0]
    return Sample(KIND, dialogue(draw))
