"""The families of models that reason before they answer, by the names that vLLM has for their parsers.

A family is chosen by name, or by the texts in a model's chat template: many models share the markers of `qwen3`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from alignedserve.config.choices import AUTO, NONE, REASONING_FAMILIES
from alignedserve.text.reasoning import harmony
from alignedserve.text.reasoning.harmony import HarmonySplitter
from alignedserve.text.reasoning.splitting import MarkedSplitter, Splitter

_THINK, _UNTHINK = ("<think>",), ("</think>",)


@dataclass(frozen=True)
class ReasoningFamily:
    """Models that reason in one way."""

    name: str
    starts: tuple[str, ...] = _THINK
    ends: tuple[str, ...] = _UNTHINK
    always: bool = False  # whether the output begins inside, even where neither prompt nor output has the start marker
    calls: tuple[str, ...] = ()  # texts with which calls begin, which some models write without ending their reasoning
    around_answer: tuple[str, ...] = ()

    @property
    def markers(self) -> frozenset[str]:
        """The texts that the splitter must see and takes out, even if they are special tokens."""
        return frozenset((*self.starts, *self.ends, *self.around_answer))

    @property
    def closing(self) -> str:
        """The text that ends the reasoning when its budget is used up."""
        return self.ends[0]

    def begins_inside(self, before: str) -> bool:
        """Return whether an output is reasoning from the start, by the end of the prompt."""
        before = before.rstrip()
        if before.endswith(self.starts):
            return True
        return self.always and not before.endswith(self.ends)

    def make_splitter(self, inside: bool, calls: bool, hidden: Iterable[str] = ()) -> Splitter:
        """Return the splitter of one output.

        `calls`: the model may call tools. `hidden` are markers that clients do not see even in an answer."""
        dropped = tuple(sorted({*self.around_answer, *hidden}))
        return MarkedSplitter(self.starts, self.ends, self.calls if calls else (), dropped, inside)


@dataclass(frozen=True)
class _Harmony(ReasoningFamily):
    @property
    def markers(self) -> frozenset[str]:
        return frozenset(harmony.MARKERS)

    @property
    def closing(self) -> str:
        return f"{harmony.END}{harmony.START}assistant{self.ends[0]}"

    def make_splitter(self, inside: bool, calls: bool, hidden: Iterable[str] = ()) -> Splitter:
        return HarmonySplitter(inside, calls)


_CALLS = ("<tool_call>",)
_KIMI_CALLS = ("<|tool_calls_section_begin|>",)
_K3_AROUND = "<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"
_INKLING_AROUND = "<|message_model|>", "<|end_message|>", "<|content_text|>", "<|content_model_end_sampling|>"
_COHERE = ("<|START_THINKING|>",), ("<|END_THINKING|>",)
_THOUGHTS = "Here is my thought process:", "Here's my thought process:"
_RESPONSES = "Here is my response:", "Here's my response:"
_GPT_OSS = (f"{harmony.CHANNEL}analysis{harmony.MESSAGE}",), (f"{harmony.CHANNEL}final{harmony.MESSAGE}",)
_THOUGHT = "<|message_model|><|content_thinking|>", "<|content_thinking|>"

_ROWS = (  # that differ from most, who reason between <think> and </think>
    *(ReasoningFamily(name, always=True) for name in ("deepseek_r1", "minimax_m2", "olmo3", "step3", "step3p5")),
    *(ReasoningFamily(name, calls=_CALLS) for name in ("glm45", "glm47", "hy_v3", "mimo", "nemotron_v3", "qwen3")),
    *(ReasoningFamily(name, *_COHERE) for name in ("cohere_command3", "cohere_command4")),
    ReasoningFamily("ernie45", around_answer=("<response>", "</response>")),
    ReasoningFamily("gemma4", ("<|channel>thought",), ("<channel|>",), calls=("<|tool_call>",)),
    ReasoningFamily("granite", _THOUGHTS, _RESPONSES),
    ReasoningFamily("hunyuan_a13b", around_answer=("<answer>", "</answer>")),
    ReasoningFamily(
        "inkling", _THOUGHT, ("<|end_message|>",), False, ("<|content_invoke_tool_json|>",), _INKLING_AROUND
    ),
    ReasoningFamily("kimi", ("◁think▷",), ("◁/think▷",)),
    ReasoningFamily("kimi_k2", calls=_KIMI_CALLS),
    ReasoningFamily("kimi_k3", ("<|open|>think<|sep|>",), ("<|close|>think<|sep|>",), around_answer=_K3_AROUND),
    ReasoningFamily("minimax_m3", ("<mm:think>",), ("</mm:think>",)),
    ReasoningFamily("mistral", ("[THINK]",), ("[/THINK]",)),
    _Harmony("openai_gptoss", *_GPT_OSS),
    ReasoningFamily("seed_oss", ("<seed:think>",), ("</seed:think>",)),
    ReasoningFamily("solar_open2", ("<|think:start|>",), ("<|think:end|>",), calls=("<|tool_call:start|>",)),
)
FAMILIES = {name: ReasoningFamily(name) for name in REASONING_FAMILIES} | {family.name: family for family in _ROWS}

# Texts that all stand in the chat templates of a family; the first row that fits counts.
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai_gptoss", (harmony.CHANNEL, harmony.MESSAGE, "analysis")),
    ("gemma4", ("<|channel>", "<channel|>")),
    ("solar_open2", ("<|think:end|>",)),
    *((name, FAMILIES[name].starts[-1:]) for name in ("mistral", "seed_oss", "minimax_m3", "kimi", "kimi_k3")),
    *((name, FAMILIES[name].starts[-1:]) for name in ("inkling", "cohere_command3")),
    ("granite", ("Here is my thought process",)),
    ("kimi_k2", ("</think>", *_KIMI_CALLS)),
    ("ernie45", ("</think>", "</response>")),
    ("hunyuan_a13b", ("</think>", "</answer>")),
    ("qwen3", ("</think>",)),
    ("qwen3", ("<think>",)),
)


def choose_family(name: str, template: str) -> ReasoningFamily | None:
    """Return the family of this name; `auto`: the family whose markers the chat template has; `none`: no family."""
    if name == AUTO:
        shown = (family for family, signs in _SIGNS if all(sign in template for sign in signs))
        name = next(shown, NONE)
    return FAMILIES.get(name)
