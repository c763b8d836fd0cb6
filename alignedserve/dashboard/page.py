"""The page as HTML. Live, it asks its own server for pictures; with a recorded run in it, it asks nobody."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files

_RECORDING = '<script id="recording" type="application/json"></script>'


@cache
def live_page() -> str:
    return files("alignedserve.dashboard").joinpath("page.html").read_text(encoding="utf-8")


def recorded_page(pictures: Iterable[bytes]) -> str:
    """Return the page with these pictures in it, each as JSON."""
    # A script ends at its first </script>, whatever that is part of; no JSON needs a `<` outside of a string.
    shown = b",".join(pictures).decode().replace("<", "\\u003c")
    return live_page().replace(_RECORDING, _RECORDING.replace("></", f">[{shown}]</"))


def policy(page: str) -> str:
    """Return the Content-Security-Policy of a page: its own script and style, its own server, and nothing else."""

    def source_of(tag: str) -> str:
        found = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        if found is None:
            return "'none'"
        return f"'sha256-{base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()}'"

    script, style = source_of("script"), source_of("style")
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
