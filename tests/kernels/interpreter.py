"""Triton's interpreter, a third faster, and as exact as a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch


def patch_once(patch: Callable[[Any, str, Any], None]) -> None:
    """Let the interpreter replace the functions of Triton's language once a launch, and not again for each function
    that a kernel calls: that is a third of its time."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch_lang = interpreter._patch_lang
    nothing = SimpleNamespace(restore=lambda: None)

    def once(function: Any) -> Any:
        languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        return nothing if all(each.static_print is print for each in languages) else patch_lang(function)

    patch(interpreter, "_patch_lang", once)


@pytest.fixture(scope="session", autouse=True)
def patched_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        with suppress(ImportError):
            patch_once(monkeypatch.setattr)
        yield


def round_to_bf16(patch: Callable[[Any, str, Any], None]) -> None:
    """Have the interpreter round fp32 to bf16 as GPUs do: it cuts the last bits off."""
    import triton.language as tl
    from triton.runtime import interpreter

    converted = interpreter._convert_float

    def convert(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return converted(numbers, source, target, rounding)
        rounded = torch.from_numpy(numbers.view("float32").copy()).bfloat16()
        return rounded.view(torch.uint16).numpy()

    patch(interpreter, "_convert_float", convert)
