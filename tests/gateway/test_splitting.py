"""Tests that text is parted into reasoning and answer by every family's markers, however it is cut into pieces."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.config.choices import AUTO, NONE, REASONING_FAMILIES
from alignedserve.text.reasoning.families import FAMILIES, ReasoningFamily, choose_family
from alignedserve.text.reasoning.splitting import ReasoningPhase, Splitter, SplitText
from tests.conftest import examples

HEAD = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
LIKE_QWEN3 = [
    name for name, family in FAMILIES.items() if replace(family, name="qwen3", always=False) == FAMILIES["qwen3"]
][1:]
MARKED = [family for family in FAMILIES.values() if family.name != "openai_gptoss"]


PARTS = ("<|open|>", "<|sep|>", "<|close|>", "<|channel>")  # special tokens that begin longer markers


def part(splitter: Splitter, text: str, cuts: list[int]) -> SplitText:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[start:end] for start, end in pairwise(edges)]
    found = [*map(splitter.feed, pieces), splitter.flush()]
    return SplitText(*map("".join, zip(*found, strict=True)))


@pytest.mark.parametrize("family", MARKED, ids=lambda family: family.name)
def test_a_family_parts_reasoning_and_answer(family: ReasoningFamily) -> None:
    start, end = family.starts[-1], family.ends[-1]
    for text, inside in (
        (f"\n{start}\nHm, 5 < 7.\n{end}\n\nIt is 7.", False),
        (f"\nHm, 5 < 7.\n{end}\n\nIt is 7.", True),
    ):
        assert part(family.make_splitter(inside, True), text, []) == SplitText("Hm, 5 < 7.", "It is 7.")
    cut_off = part(family.make_splitter(True, True), f"{start}Hm, {end[:-1]}", [])
    assert cut_off == SplitText(f"Hm, {end[:-1]}", "")
    assert part(family.make_splitter(False, True), " Hello, \n", []) == SplitText("", " Hello, \n")
    assert part(family.make_splitter(False, True), f"{end}Hello", []) == SplitText("", "Hello")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{HEAD}Hm.<|end|>{FINAL}It is 7.", SplitText("Hm.", "It is 7.")),
        (f"{HEAD}Hm.<|end|>{FINAL}It is 7.<|return|>", SplitText("Hm.", "It is 7.")),
        (f"{HEAD}Hm.<|end|><|start|>assistant{HEAD}Oh.<|end|>{FINAL}7", SplitText("Hm.\nOh.", "7")),
        (f"{HEAD}Hm.{FINAL}7", SplitText("Hm.", "7")),
        (f"{HEAD}Hm.<|channel|>final <|constrain|>json<|message|>{{}}", SplitText("Hm.", "{}")),
        ("<|channel|>commentary<|message|>I look.<|end|>" + CALL, SplitText("", "I look." + CALL)),
        (
            f"{HEAD}Hm.<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{{}}<|call|>",
            SplitText("Hm.", CALL),
        ),
        (
            f"{HEAD}Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{}}",
            SplitText("Hm.", CALL.removesuffix("<|call|>")),
        ),
        (" to=functions.f<|channel|>commentary<|message|>{}<|call|>", SplitText("", CALL)),
        ("<|end|>" + FINAL + "7", SplitText("", "7")),
        ("Just a text.", SplitText("", "Just a text.")),
        (" to", SplitText("", " to")),
        ("to=", SplitText("", "")),
        ("<|channel|>" + "x" * 600, SplitText("", "x" * 600)),
        (f"{HEAD}Hm.<|end|><|start|>assist", SplitText("Hm.", "")),
    ],
)
def test_channels_are_parted(text: str, expected: SplitText) -> None:
    for cuts in ([], list(range(len(text))), list(range(0, len(text), 7))):
        assert part(FAMILIES["openai_gptoss"].make_splitter(False, True), text, cuts) == expected


def test_a_prompt_may_open_a_channel() -> None:
    text = f"Hm.<|end|>{FINAL}7"
    assert part(FAMILIES["openai_gptoss"].make_splitter(True, True), text, []) == SplitText("Hm.", "7")


def test_a_call_without_tools_is_its_body() -> None:
    assert part(FAMILIES["openai_gptoss"].make_splitter(False, False), CALL, []) == SplitText("", "{}")


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES.values() if family.name not in LIKE_QWEN3], ids=lambda family: family.name
)
@settings(max_examples=examples(50))
@given(data=st.data())
def test_cuts_change_nothing(family: ReasoningFamily, data: st.DataObject) -> None:
    words = st.sampled_from(
        [*sorted(family.markers), *PARTS, "assistant", "to=f", "analysis", "final", "a", " ", "\n", "<", "Here"]
    )
    text = "".join(data.draw(st.lists(words, max_size=12)))
    inside, calls = data.draw(st.booleans()), data.draw(st.booleans())
    hidden = data.draw(st.sampled_from([(), family.ends, PARTS]))
    cuts = data.draw(st.lists(st.integers(0, 200), max_size=12))
    whole = part(family.make_splitter(inside, calls, hidden), text, [])
    assert part(family.make_splitter(inside, calls, hidden), text, cuts) == whole


def test_an_answer_begins_at_once() -> None:
    """What surely belongs to a part is not held back."""
    splitter = FAMILIES["qwen3"].make_splitter(False, True)
    pieces = ["<think>", "One ", "two", "</", "think>", "\n", "Yes", " no"]
    found = [splitter.feed(piece) for piece in pieces]
    assert [split.reasoning for split in found] == ["", "One", " two", "", "", "", "", ""]
    assert [split.text for split in found] == ["", "", "", "", "", "", "Yes", " no"]
    assert splitter.phase is ReasoningPhase.ANSWER


def test_a_call_ends_the_reasoning_where_the_model_may_call() -> None:
    family, text = FAMILIES["kimi_k2"], "Hm. <|tool_calls_section_begin|>x"
    assert part(family.make_splitter(True, True), text, []) == SplitText("Hm.", "<|tool_calls_section_begin|>x")
    assert part(family.make_splitter(True, False), text, []) == SplitText(text, "")


def test_texts_around_an_answer_are_dropped() -> None:
    assert part(
        FAMILIES["ernie45"].make_splitter(True, True), "Hm.</think>\n\n<response>\nYes.\n</response>\n", []
    ) == (SplitText("Hm.", "Yes.\n"))
    mistral = FAMILIES["mistral"]
    assert part(mistral.make_splitter(True, True, mistral.markers), "Hm.[/THINK]Yes[/THINK], no.", []) == SplitText(
        "Hm.", "Yes, no."
    )


@pytest.mark.parametrize(
    ("name", "text", "hidden", "expected"),
    [
        (
            "kimi_k3",
            "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>It is 7.<|close|>response<|sep|>"
            "<|close|>message<|sep|>",
            PARTS,
            SplitText("Hm.", "It is 7."),
        ),
        ("kimi_k3", "<|open|>response<|sep|>It is <|open|>7.<|close|>", PARTS, SplitText("", "It is7.")),
        (
            "inkling",
            "<|message_model|><|content_thinking|>Hm.<|end_message|><|message_model|><|content_text|>It is 7."
            "<|end_message|>",
            (),
            SplitText("Hm.", "It is 7."),
        ),
        ("inkling", "<|message_model|><|content_text|>It is 7.<|end_message|>", (), SplitText("", "It is 7.")),
        ("inkling", "<|message_model|>", (), SplitText("", "")),
        ("hy_v3", "<think>Hm.</think>It is 7.", (), SplitText("Hm.", "It is 7.")),
    ],
)
def test_answers_in_channels_of_their_own(name: str, text: str, hidden: tuple[str, ...], expected: SplitText) -> None:
    for cuts in ([], list(range(len(text)))):
        assert part(FAMILIES[name].make_splitter(False, True, hidden), text, cuts) == expected


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{{ '<|channel|>analysis<|message|>' }}", "openai_gptoss"),
        ("[THINK]{{ x }}[/THINK]", "mistral"),
        ("<|channel>thought\n<channel|>", "gemma4"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "qwen3"),
        ("</think> <|tool_calls_section_begin|>", "kimi_k2"),
        ("Write 'Here is my thought process:' first", "granite"),
        ("Write <think></think> and <response></response>", "ernie45"),
        ("<|open|>think<|sep|>{{ x }}<|close|>think<|sep|>", "kimi_k3"),
        ("<|message_model|><|content_thinking|>{{ x }}<|end_message|>", "inkling"),
        ("<|assistant|>{{ x }}", None),
    ],
)
def test_a_template_shows_the_family(template: str, family: str | None) -> None:
    assert choose_family(AUTO, template) == (FAMILIES[family] if family is not None else None)
    assert choose_family(NONE, template) is None
    assert choose_family("deepseek_r1", template) is FAMILIES["deepseek_r1"]


@pytest.mark.parametrize(
    ("name", "prompt", "inside"),
    [
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n", False),
        ("qwen3", "<think>\n\n</think>\n\n", False),
        ("deepseek_r1", "<|Assistant|>", True),
        ("deepseek_r1", "<|Assistant|></think>", False),
        ("openai_gptoss", "<|start|>assistant", False),
        ("openai_gptoss", "<|start|>assistant<|channel|>analysis<|message|>", True),
    ],
)
def test_a_prompt_shows_where_its_output_begins(name: str, prompt: str, inside: bool) -> None:
    assert FAMILIES[name].begins_inside(prompt) is inside


def test_settings_can_name_every_family() -> None:
    assert tuple(FAMILIES) == REASONING_FAMILIES
