"""What other parts know of these schedulers and memories; it loads none of their code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from alignedserve.errors import ConfigError
from alignedserve.papers.names import SchedulerName
from alignedserve.papers.orders import BY_ACCELGEN, BY_LEVELS, BY_REMAINING
from alignedserve.scheduling.form_rules import PLAIN, BlockUse
from alignedserve.scheduling.orders import BY_DUE, BY_SLACK
from alignedserve.scheduling.policy import ALIGNED, Chunking, Room, SchedulerRules

HYBRID, WEIGHED, TWO_ENDED = "hybrid", "weighed", "two_ended"  # memories: schedule.memory
HIDDEN = "hidden"  # the form of a request that is kept as hidden vectors (core.KvForm)

_AT_ONCE_OR_BY_BLOCK = (Room.WHOLE, Room.GROWING)
_PLAIN = {"memory": (PLAIN,)}
_BY_SERVICE = {"chunking": (Chunking.NONE, Chunking.FIXED), "room": _AT_ONCE_OR_BY_BLOCK}

_FCFS = SchedulerRules(fills=False)
_TURNS = SchedulerRules(fills=False, takes=_PLAIN | _BY_SERVICE)  # by class or past service, not by promises
RULES: Mapping[str, SchedulerRules] = {
    SchedulerName.BEST_FIT: SchedulerRules(BY_DUE, is_rt_first=True),
    SchedulerName.BROS: SchedulerRules(BY_SLACK, is_rt_first=True),
    SchedulerName.SHORTEST: SchedulerRules(BY_REMAINING),
    SchedulerName.ALISE: SchedulerRules(  # "defers" newcomers where memory is given at once (ALISE §4.3)
        BY_LEVELS, swaps=(Room.GROWING, Room.CHUNKS), takes=_PLAIN
    ),
    SchedulerName.ACCELGEN: SchedulerRules(BY_ACCELGEN),
    SchedulerName.ACCELGEN_NO_BATCH: SchedulerRules(BY_ACCELGEN),
    SchedulerName.ACCELGEN_NO_ORDER: SchedulerRules(),
    SchedulerName.FCFS: _FCFS,
    SchedulerName.VLLM_V0: _FCFS,
    SchedulerName.VLLM_V1: _FCFS,
    SchedulerName.ORCA: _FCFS,
    SchedulerName.SARATHI: _FCFS,
    SchedulerName.FASTGEN: _FCFS,
    SchedulerName.DISTSERVE: _FCFS,
    SchedulerName.LONGEST: _FCFS,
    SchedulerName.ROUND_ROBIN: _TURNS,
    SchedulerName.MLFQ: _TURNS,
    SchedulerName.FASTSERVE: replace(_TURNS, swaps=_AT_ONCE_OR_BY_BLOCK),
    SchedulerName.APT_SERVE: replace(_TURNS, takes=_BY_SERVICE | {"memory": (HYBRID, WEIGHED)}),
    SchedulerName.TGI: replace(_TURNS, takes=_PLAIN | {"chunking": (Chunking.NONE,)}),
}

_BY_DUE = (ALIGNED, SchedulerName.BEST_FIT, SchedulerName.BROS)
_HYBRID = BlockUse(  # the form of a prompt is chosen once
    {"room": _AT_ONCE_OR_BY_BLOCK, "scheduler": (*_BY_DUE, SchedulerName.APT_SERVE)},
    "with memory hybrid what is kept of a request may change before each step",
    keeps_hidden=True,
    keeps_apart=False,
)
_TWO_ENDED = BlockUse(  # two requests may be in one block (BROS §5)
    {"room": (Room.GROWING,)},
    "with memory two_ended a chat may take slots of any request before each step",
    "KV that comes directly needs blocks of its own: schedule.memory two_ended shares them",
    keeps_apart=False,
    on_host=1.0,
)
MEMORIES: Mapping[str, BlockUse] = {
    HYBRID: _HYBRID,  # KV, or for some requests hidden vectors: half the memory, and time in every step
    WEIGHED: BlockUse({"scheduler": (SchedulerName.APT_SERVE,)}),  # KV alone, to the requests that are worth most
    TWO_ENDED: _TWO_ENDED,  # a block holds a chat's tokens from the left, and another's from the right
}


def block_use_of(memory: str) -> BlockUse:
    """Return how this memory uses blocks. `two_ended:0.2` has host memory for a fifth of the device's tokens.

    Raises ConfigError."""
    name, colon, share = memory.partition(":")
    if name not in MEMORIES or (colon and name != TWO_ENDED):
        raise ConfigError(f"schedule.memory {memory!r:.40} is not known: choose {PLAIN}, {', '.join(MEMORIES)}")
    if not colon:
        return MEMORIES[name]
    try:
        on_host = float(share)
    except ValueError:
        on_host = -1.0
    if not 0 <= on_host <= 100:
        raise ConfigError(f"schedule.memory {memory!r:.40}: behind the colon stands a share, such as 0.2")
    return replace(MEMORIES[name], on_host=on_host)
