"""Triton's interpreter, a third faster."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def patched_once() -> Iterator[None]:
    """Let the interpreter replace the functions of Triton's language once a launch, and not again for each function
    that a kernel calls: that is a third of its time."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        yield
        return
    patch_lang = interpreter._patch_lang
    nothing = SimpleNamespace(restore=lambda: None)

    def patch(function: Any) -> Any:
        languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        return nothing if all(each.static_print is print for each in languages) else patch_lang(function)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", patch)
        yield
