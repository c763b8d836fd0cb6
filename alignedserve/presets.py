"""How other systems schedule, as policies of ours: to be compared with, in the simulator and on real workers.

Their papers and sources say more than a policy can; what each line leaves out is said beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from alignedserve.config_sources import hint
from alignedserve.errors import ConfigError
from alignedserve.policy import Compression, Grouping, Order, Policy, Room, Steps


@dataclass(frozen=True)
class Preset:
    about: str
    policy: Policy
    step_tokens: int = 2048  # in one step
    batch: int = 128  # requests in one step


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "fcfs": Preset(
            "first come, first served: decodes, and chunks of prompts beside them; memory for the longest output",
            Policy(Order.FCFS, grouping=Grouping.FCFS, rt_reserve=0.0),
        ),
        "slack": Preset(
            "our default on workers: the most urgent first, steps end in time for the tightest deadline", Policy()
        ),
        "slack-int8": Preset(
            "the same, with pages of who waits in the pool as int8 while few are free",
            Policy(compression=Compression.AUTO),
        ),
        "vllm-chunked": Preset(
            "vLLM with chunked prefill (its V1): decodes, then chunks up to 2,048 tokens; the newest is recomputed",
            Policy(Order.FCFS, room=Room.GROWING, grouping=Grouping.FCFS, rt_reserve=0.0),
        ),
        "vllm-fcfs": Preset(
            "vLLM without chunked prefill (its V0): whole prompts alone whenever one fits, else decodes",
            Policy(Order.FCFS, Steps.PROMPTS_FIRST, Room.GROWING, Grouping.FCFS, rt_reserve=0.0),
            step_tokens=8192,
        ),
    }
)


def preset(name: str) -> Preset:
    if name not in PRESETS:
        raise ConfigError(f"there is no preset {name!r:.40}: there are {', '.join(PRESETS)}{hint(name, PRESETS)}")
    return PRESETS[name]
