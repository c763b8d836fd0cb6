"""AlignedServe: one serving system for real-time chat and best-effort documents on the same GPUs.

__init__.pyi The types of what `from alignedserve import ...` gives.
__main__.py  `python -m alignedserve`, and the script `alignedserve`.
core.py      The nouns that every part shares. Only the standard library is imported here.
errors.py    Every error that AlignedServe raises on purpose.
fallbacks.py What a process does otherwise, since something does not work or is missing.
http_client.py The HTTP client of commands, of `LLM` and of the lab.
interrupt.py Ends the process at Ctrl-C while modules are imported.
locks.py     Locks between the processes of one user, on files that nobody else can open.
progress.py  A progress bar on one line of a terminal, with notes.
safe_path.py Keeps the working directory off the path on which Python finds modules.
signs.py     Signs of life of a part that starts: what it does, and how far it is.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

LAB = "alignedserve.lab"  # found by name: the product imports nothing of it, and runs without it
NO_LAB = f"is part of {LAB}, which is not installed: pip install --force-reinstall 'alignedserve[lab]'"

# The Python API; __init__.pyi tells its types.
_HOMES = {
    "LLM": "alignedserve.api.llm",
    "Deployment": "alignedserve.api.deployment",
    "SamplingParams": "alignedserve.api.llm",
    "Slo": "alignedserve.api.llm",
    "RequestOutput": "alignedserve.api.outputs",
    "CompletionOutput": "alignedserve.api.outputs",
    "simulate": f"{LAB}.api.simulating",
    "compare": f"{LAB}.api.simulating",
    "System": f"{LAB}.api.simulating",
}


def __getattr__(name: str) -> Any:
    """Import a name of the Python API when it is asked for: parts and commands need none of them."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _HOMES[name].startswith(LAB) and find_spec(LAB) is None:
        raise ImportError(f"{name} {NO_LAB}")
    return getattr(import_module(_HOMES[name]), name)
