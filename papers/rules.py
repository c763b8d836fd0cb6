"""What other parts know of these schedulers; it loads none of their code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from alignedserve.papers.names import SchedulerName
from alignedserve.papers.orders import BY_ACCELGEN, BY_LEVELS, BY_REMAINING
from alignedserve.scheduling.orders import BY_DUE, BY_SLACK
from alignedserve.scheduling.policy import Cache, Chunking, Layout, Room, SchedulerRules

_AT_ONCE_OR_BY_BLOCK = (Room.WHOLE, Room.GROWING)
_KV, _PLAIN = {"cache": (Cache.KV,)}, {"blocks": (Layout.PLAIN,)}
_BY_SERVICE = {"chunking": (Chunking.NONE, Chunking.FIXED), "room": _AT_ONCE_OR_BY_BLOCK, **_PLAIN}

_FCFS = SchedulerRules(fills=False)
_TURNS = SchedulerRules(fills=False, takes=_KV | _BY_SERVICE)  # by class or past service, not by promises
RULES: Mapping[str, SchedulerRules] = {
    SchedulerName.BEST_FIT: SchedulerRules(BY_DUE, is_rt_first=True, takes={}),
    SchedulerName.BROS: SchedulerRules(BY_SLACK, is_rt_first=True, takes={}),
    SchedulerName.SHORTEST: SchedulerRules(BY_REMAINING),
    SchedulerName.ALISE: SchedulerRules(  # "defers" newcomers where memory is given at once (ALISE §4.3)
        BY_LEVELS, swaps=(Room.GROWING, Room.CHUNKS), takes=_KV | _PLAIN
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
    SchedulerName.APT_SERVE: replace(_TURNS, takes=_BY_SERVICE),
    SchedulerName.TGI: replace(_TURNS, takes=_KV | {"chunking": (Chunking.NONE,)}),
}
