"""The names that clients of other servers (llama.cpp, Ollama, LM Studio, DeepSeek, Mistral) have for what a body says:

    taken      repeat_penalty: 1.1          repetition_penalty: 1.1, which means the same
    left out   num_ctx: 8192                a header names it: it is about another engine, or changes the style alone
    refused    tempereture: 0               whatever no server has

Ollama's `options` hold such names and ours. An error or a header says a name as its client wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from alignedserve.gateway.openai.errors import ApiError, invalid

_Fields: TypeAlias = dict[str, Any]
OPTIONS = "options"


def _as(ours: str) -> Callable[[Any], _Fields]:
    return lambda value: {ours: value}


def _form(wanted: Any) -> _Fields:
    return {"guided_json": {"type": "object"} if wanted == "json" else wanted}


def _thinking(wanted: Any) -> _Fields:
    """Read `true`, an effort such as `low`, or `{"type": "enabled", "budget_tokens": 100}`."""
    if isinstance(wanted, str):
        return {"reasoning_effort": wanted}
    if not isinstance(wanted, dict) or wanted.keys() - {"type", "budget_tokens"}:
        return {"enable_thinking": wanted}
    kinds: _Fields = {"enabled": True, "disabled": False, "auto": None, "adaptive": None}
    is_on = kinds.get(str(wanted.get("type")), wanted)  # any other is refused as what it is
    return {"enable_thinking": is_on, "max_reasoning_tokens": None if is_on is False else wanted.get("budget_tokens")}


TAKEN: Mapping[str, Callable[[Any], _Fields]] = {
    "repeat_penalty": _as("repetition_penalty"),
    "random_seed": _as("seed"),
    "n_predict": _as("max_tokens"),
    "num_predict": _as("max_tokens"),
    "json_schema": _as("guided_json"),
    "grammar": _as("guided_grammar"),
    "format": _form,
    "think": _thinking,
    "thinking": _thinking,
}
# Names of ours that `options` may have too.
OF_OPTIONS = frozenset(
    ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
)
LEFT_OUT = frozenset(
    (
        # the context, memory and threads: they are the server's
        *("num_ctx", "n_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "n_keep", "n_discard"),
        *("use_mmap", "use_mlock", "low_vram", "f16_kv", "numa", "keep_alive", "ttl"),
        # caches and reports
        *("cache_prompt", "id_slot", "slot_id", "timings_per_token", "return_progress", "reasoning_format"),
        *("n_indent", "t_max_prompt_ms", "lora", "safe_prompt"),
        # ways to sample that are not here: the answer is in another style
        *("typical_p", "typ_p", "tfs_z", "mirostat", "mirostat_tau", "mirostat_eta", "repeat_last_n", "samplers"),
        *("penalize_newline", "penalize_nl", "dynatemp_range", "dynatemp_exponent", "xtc_probability", "xtc_threshold"),
        *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
        *("top_n_sigma", "min_keep"),
    )
)


@dataclass
class Translated:
    """A body in our names, and what its client calls them."""

    tree: _Fields
    told: dict[str, str] = field(default_factory=dict)  # our name -> the client's
    left_out: list[str] = field(default_factory=list)

    def take(self, name: str, fields: _Fields) -> None:
        """Take these fields of ours for the client's field of that name."""
        for ours, value in fields.items():
            before = self.tree.get(ours)
            if None not in (before, value) and before != value:
                message = f"{name}: {self.told.get(ours, ours)} sets the same: use only one of them"
                raise invalid(message, name, "invalid_value")
            if value is not None:
                self.tree[ours], self.told[ours] = value, name

    def renamed(self, error: ApiError) -> ApiError:
        """Return an error about this body with the client's own names."""
        if not self.told or error.param is None:
            return error
        ours = re.compile(rf"\b({'|'.join(self.told)})\b")
        message, param = (ours.sub(lambda name: self.told[name[0]], text) for text in (error.message, error.param))
        return ApiError(error.status, message, param=param, code=error.code)


def translated(given: Mapping[str, Any], known: Set[str]) -> Translated:
    """Return a body in the names that are known; a name that nobody has stays as it is, to be refused."""
    made = Translated({name: value for name, value in given.items() if name in known})
    others = {name: value for name, value in given.items() if name not in known}
    options = others.get(OPTIONS)
    if options is None or isinstance(options, dict):
        others.pop(OPTIONS, None)
        others |= {f"{OPTIONS}.{name}": value for name, value in (options or {}).items()}
    for name, value in others.items():
        word = name.removeprefix(f"{OPTIONS}.")
        take = TAKEN.get(word) or (_as(word) if name != word and word in OF_OPTIONS else None)
        if word in LEFT_OUT or (take is not None and value is None):
            made.left_out += [] if value is None else [name]
        elif take is None or not (fields := take(value)).keys() <= known:
            made.tree[name] = value
        else:
            made.take(name, fields)
    return made
