"""Presets: schedules by name, ours and other systems', to be compared on real workers and simulated.

A preset replaces defaults; `--set path=value`, a file and a variable outweigh it. `alignedserve presets` prints all of
them. `source` cites the paper, whose rules stand in papers/; `differs` says what is not as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from alignedserve.config.sources import hint
from alignedserve.errors import ConfigError
from alignedserve.scheduling.offered import of_papers

PresetSettings = Mapping[str, str | int | float | bool]  # by a setting's path, as a file would say it


@dataclass(frozen=True)
class Preset:
    about: str
    settings: PresetSettings
    source: str = "ours"  # where it is described
    differs: str = ""  # what of that is missing or done in another way


_OURS: Mapping[str, Preset] = {
    "aligned": Preset("the default: the most urgent first, real-time before best-effort; steps end in time", {}),
    "aligned-int8": Preset(
        "the default, with pages of waiting requests as int8 while few pages are free",
        {"kvpool.compression": "auto"},
    ),
    "aligned-whole": Preset(
        "the default with memory for the longest output at once: no request has to leave",
        {"schedule.room": "whole"},
    ),
    "alignedserve": Preset(
        "the default with prompts apart: batches of about one length from the KV pool's quad-tree, and prefill workers"
        " hold the next one ahead of time (AlignedServe)",
        {
            "topology": "1+1",
            "transport": "direct",
            "prefill.lends": "never",
            "schedule.handoff": "pool",
            "schedule.candidate_share": 0.5,  # a batch takes 0.4 of a decode worker's device
        },
    ),
    "aligned-no-chunk": Preset("the default with a fixed budget", {"schedule.chunking": "fixed"}),
}

DEFAULT = "aligned"


@cache
def presets() -> Mapping[str, Preset]:
    """Return all presets by name: ours, then the papers'."""
    papers = of_papers("presets")
    return MappingProxyType(_OURS if papers is None else {**_OURS, **papers.PRESETS})


def preset(name: str) -> Preset:
    known = presets()
    if name not in known:
        meant = hint(name, known) or " (see alignedserve presets)"
        raise ConfigError(f"there is no preset {name!r:.40}{meant}")
    return known[name]
