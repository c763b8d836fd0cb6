"""The report of a script, as JSON: the client's version, the answers it got, the errors it raised."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

OTHER = "other"  # a model that the server does not have
LONGER = 1_000  # repeats the question this often: more than the model's context


def answer(text: str, finish: str | None, prompt: int, completion: int, total: int) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}
    return {"text": text, "finish": finish, "usage": usage}


def raised(ask: Callable[[], object]) -> dict[str, Any]:
    try:
        told = ask()
    except Exception as error:
        kind = type(error)
        status = getattr(error, "status_code", None)
        return {"kind": f"{kind.__module__}.{kind.__qualname__}", "status": status, "message": str(error)}
    return {"kind": None, "status": None, "message": f"no error, but {told!r}"}


def say(
    version: str, whole: dict[str, Any], streamed: dict[str, Any], pieces: Sequence[str], **more: dict[str, Any]
) -> None:
    """Print the report; `more` has errors, and the answers to the questions of forms.py."""
    pieces = [piece for piece in pieces if piece]
    print(json.dumps({"version": version, "whole": whole, "streamed": streamed, "pieces": len(pieces), **more}))
