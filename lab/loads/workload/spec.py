"""Reads a workload from text: a stream on the command line, a workload that has a name, or a file of streams.

    trace:PATH                              times and lengths from a file
    lengths:PATH,rate=5.5,cv=1              lengths from a file
    chats:PATH,rate=2                       texts from a file
    mix:short=0.9,rate=8                    short and long prompts
    sizes:prompt=512-1024,output=128        any sizes
    coserve,rate=5.5,documents.in_flight=64
    FILE.yaml,rate=5.5                      `streams`, a list of streams as above, and keys of the whole

Each text becomes the same tree of plain values, as a file has them; build.py makes a `Mixture` of the tree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alignedserve.config.sources import hint, read_json, read_yaml
from alignedserve.errors import ConfigError, WorkloadError
from alignedserve.lab.loads.workload.build import KINDS, WHOLE_KEYS, Tree, build, keys_of
from alignedserve.lab.loads.workload.load import Mixture
from alignedserve.lab.loads.workload.stream import Stream

_FILES = (".yaml", ".yml", ".json")


def read_workload(text: str) -> Mixture:
    head, *pairs = (part.strip() for part in text.split(","))
    path = Path(head)
    if path.suffix in _FILES and not _is_kind(head):
        return build(_overridden(_read(path), pairs), head, path.parent)
    return build(_overridden(*_from_command_line(head, pairs)), "workload", Path())


def rate_of(text: str) -> str | None:
    """Return the text's own setting of a rate, if it has one."""
    found = re.search(r"(?<=[,:])\s*(rate(_scale)?\s*=[^,]*)", text)
    return found[1] if found else None


def _is_kind(head: str) -> bool:
    return head.partition(":")[0] in KINDS and ":" in head


def _from_command_line(head: str, pairs: list[str]) -> tuple[Tree, list[str]]:
    """Return the tree of a workload that is no file, and the pairs that change it."""
    kind, _, rest = head.partition(":")
    if head in NAMED:
        return _copy(NAMED[head]), pairs
    if not _is_kind(head):
        kinds = ", ".join(f"{kind}:" for kind in KINDS)
        wanted = f"{', '.join(NAMED)}; {kinds}; a file ending in {', '.join(_FILES)}"
        raise WorkloadError(f"workload: {head!r} is none of these: {wanted}{hint(head, NAMED)}")
    if "path" in keys_of(KINDS[kind]):
        return {"streams": [{"name": kind, "kind": kind, "path": rest}]}, pairs
    return {"streams": [{"name": kind, "kind": kind}]}, [rest, *pairs] if rest else pairs


def _read(path: Path) -> Tree:
    try:
        return _copy(read_json(path) if path.suffix == ".json" else read_yaml(path))
    except ConfigError as error:
        raise WorkloadError(str(error)) from None


def _copy(tree: Mapping[str, Any]) -> Tree:
    streams = tree.get("streams")
    if not isinstance(streams, list):
        return dict(tree)
    return {**tree, "streams": [dict(stream) if isinstance(stream, dict) else stream for stream in streams]}


def _overridden(tree: Tree, pairs: list[str]) -> Tree:
    """Change the tree by pairs: `KEY=VALUE` of the whole or of the only stream, or `STREAM.KEY=VALUE`."""
    seen = set()
    for pair in pairs:
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals:
            raise WorkloadError(f"workload: {pair!r} must be written KEY=VALUE")
        if key in seen:
            raise WorkloadError(f"workload: {key} is given twice")
        seen.add(key)
        _override(tree, key, value)
    return tree


def _override(tree: Tree, key: str, value: str) -> None:
    given = tree.get("streams")
    listed = given if isinstance(given, list) else []  # what is no list of streams, `build` reports
    streams = {str(stream.get("name", Stream.name)): stream for stream in listed if isinstance(stream, dict)}
    name, _, inner = key.rpartition(".")
    if key in WHOLE_KEYS:
        tree[key] = value
    elif name in streams:
        streams[name][inner] = value
    elif len(streams) == 1 and not name:
        next(iter(streams.values()))[key] = value
    elif streams:
        whole = ", ".join(WHOLE_KEYS)
        written = " or ".join(f"{name}.KEY" for name in streams)
        raise WorkloadError(
            f"workload: {key} is not a key of the whole ({whole}); keys of a stream are written {written}"
        )


def _streams_of(prompt: int, output: int, **more: Any) -> dict[str, Any]:
    """Return a load of Red Hat's suite: closed streams, which ask for no promise since no other server knows any."""
    closed = {"arrivals": "closed", "in_flight": 8, "num_requests": 32}
    stream = {"name": "stream", "prompt": prompt, "output": output, "is_asked": False}
    return {"streams": [{**stream, **(more or closed)}]}


# github.com/redhat-et/vllm-cpu-perf-eval: tests/concurrent-load, tests/offline-batch and docs/methodology. Its streams
# are 1 to 32 (`in_flight`).
_CPU_SUITE = {
    "cpu-chat": _streams_of(512, 512),
    "cpu-rag": _streams_of(7680, 512),
    "cpu-code": _streams_of(1024, 1024),
    "cpu-summary": _streams_of(2048, 256),
    "cpu-reasoning": _streams_of(256, 2048),
    "cpu-offline": _streams_of(1024, 64, service="be", arrivals="at_once", num_requests=100),
    "cpu-mixed": {  # which the suite plans: chats with promises beside summaries that never end
        "first_s": 120.0,
        "streams": [
            {"name": "chat", "rate": 0.2, "prompt": 512, "output": 128},
            {"name": "documents", "service": "be", "prompt": 2048, "output": 256, "arrivals": "closed", "in_flight": 4},
        ],
    },
}
NAMED: Mapping[str, Mapping[str, Any]] = {
    "chat": {"streams": [{"name": "chat"}]},
    "coserve": {
        "first_s": 60.0,
        "streams": [
            {"name": "chat"},
            {
                "name": "documents",  # BROS §6: lots of a batch interface
                "service": "be",
                "prompt": "512-1024",
                "output": "32-128",
                "arrivals": "closed",
                "in_flight": 32,
            },
        ],
    },
    "diurnal": {
        "streams": [
            {"name": "chat", "arrivals": "diurnal", "least": 1.0, "most": 8.0, "period_s": 300.0, "first_s": 600.0}
        ]
    },
    "conversations": {
        "streams": [
            {
                "name": "talk",
                "rate": 1.0,
                "num_requests": 100,
                "prompt": "lognormal:60:80:1024",
                "turns": "1-8",
                "system": 200,
                "think_s": "exp:10:60",
            }
        ]
    },
    "bursts": {
        "streams": [
            {
                "name": "chat",
                "arrivals": "bursts",
                "calm": 2.0,
                "peak": 20.0,
                "every_s": 30.0,
                "lasts_s": 3.0,
                "first_s": 120.0,
            }
        ]
    },
    **_CPU_SUITE,
}
