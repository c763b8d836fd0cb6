"""How other systems schedule, as policies of ours: to be compared with, in the simulator and on real workers.

Their papers and sources say more than a policy can; what each line leaves out is said beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from alignedserve.config_sources import hint
from alignedserve.errors import ConfigError
from alignedserve.policy import (
    Cache,
    Choice,
    Chunking,
    Compression,
    Grouping,
    Layout,
    Order,
    Packing,
    Policy,
    Predictor,
    Room,
)
from alignedserve.slo import Late


@dataclass(frozen=True)
class Preset:
    about: str
    policy: Policy
    step_tokens: int = 2048  # in one step
    batch: int = 128  # requests in one step


_FCFS = Policy(
    Order.FCFS,
    Chunking.FIXED,
    Choice.IN_ORDER,
    grouping=Grouping.FCFS,
    packing=Packing.FCFS,
    rt_reserve=0.0,
    predictor=Predictor.CONSTANT,  # who is served as they come predicts nothing
)
_ACCELGEN = Policy(
    room=Room.CHUNKS,
    grouping=Grouping.FCFS,
    reuse=False,
    late=Late.KEEP,
    as_in_paper=True,
    rt_reserve=0.0,
    predictor=Predictor.CONSTANT,
)

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "fcfs": Preset(
            "first come, first served: decodes, and chunks of prompts beside them; memory for the longest output",
            _FCFS,
        ),
        "slack": Preset(
            "our default on workers: the most urgent first, then who best fills time and memory; steps end in time",
            Policy(),
        ),
        "slack-int8": Preset(
            "the same, with pages of who waits in the pool as int8 while few are free",
            Policy(compression=Compression.AUTO),
        ),
        "slack-growing": Preset(
            "ours with memory block by block: the newest is recomputed, or waits in the pool",
            Policy(room=Room.GROWING),
        ),
        "slack-hybrid": Preset(
            "the same, some kept as hidden vectors: half the memory, and time in each step (Apt-Serve)",
            Policy(room=Room.GROWING, cache=Cache.HYBRID),
        ),
        "slack-shared": Preset(
            "slack-growing with blocks from both ends: chats take slots of others, who get them back (BROS)",
            Policy(room=Room.GROWING, blocks=Layout.BIDIRECTIONAL),
        ),
        "vllm-chunked": Preset(
            "vLLM with chunked prefill (its V1): decodes, then chunks up to 2,048 tokens; the newest is recomputed",
            replace(_FCFS, room=Room.GROWING),
        ),
        "vllm-fcfs": Preset(
            "vLLM without chunked prefill (its V0): whole prompts alone whenever one fits, else decodes",
            replace(_FCFS, chunking=Chunking.NONE, room=Room.GROWING),
            step_tokens=8192,
        ),
        # BROS compares with this: two queues, whose steps take turns. Leaves nothing out that is known of it.
        "round-robin": Preset(
            "real-time and best-effort requests in alternate steps, each by arrival; the newest is recomputed",
            replace(_FCFS, packing=Packing.ROUND_ROBIN, room=Room.GROWING, reuse=False),
        ),
        # ALISE and FastServe compare with it: leaves out FastServe's skipping of levels by the prompt's length, and
        # that it swaps (the one served most is recomputed).
        "mlfq": Preset(
            "five levels by tokens already served, no prediction; the one served most is recomputed",
            replace(_FCFS, packing=Packing.MLFQ, room=Room.GROWING, reuse=False),
        ),
        # BROS without its two-directional blocks (its own ablation): leaves out checkpoints to host memory, so that
        # who gives up its memory is recomputed; prompts run in chunks beside decodes, which its vLLM did not.
        "bros-plain": Preset(
            "BROS with plain blocks: urgent real-time first, best-effort in what is left, in its memory too",
            Policy(selection=Choice.IN_ORDER, room=Room.GROWING, grouping=Grouping.FCFS, reuse=False, late=Late.KEEP),
        ),
        # Sarathi-Serve: leaves out how its budget is found (by profiling, for each TBT); a prompt has all its memory
        # when it starts, as in the vLLM that it was built on.
        "sarathi": Preset(
            "Sarathi-Serve: decodes, running chunks, then new ones, in fixed 512 tokens; several long prompts at once",
            replace(_FCFS, room=Room.GROWING, reuse=False),
            step_tokens=512,
        ),
        # DeepSpeed-FastGen: leaves out that it never recomputes (it stops taking requests in instead).
        "fastgen": Preset(
            "DeepSpeed-FastGen: the same 512 tokens filled by splitting and composing prompts; memory chunk by chunk",
            replace(_FCFS, room=Room.CHUNKS, reuse=False),
            step_tokens=512,
        ),
        # AccelGen: leaves out preemption times (nothing measures them), and that an urgent request takes the memory of
        # who has most slack: memory goes by arrival, an urgent one takes another's place in the step only.
        "accelgen": Preset(
            "AccelGen: budget by the tightest deadline, order by slack, who best fills tokens and memory; its formulas",
            _ACCELGEN,
        ),
        # Without the first of its methods prompts are whole and run alone, as in the vLLM that it was built on.
        "accelgen-no-chunk": Preset(
            "AccelGen /Chunk: whole prompts alone, by slack, who best fills tokens and memory",
            replace(_ACCELGEN, chunking=Chunking.NONE, room=Room.GROWING),
            step_tokens=8192,
        ),
        "accelgen-no-order": Preset(
            "AccelGen /Order: first come, first served, among those of three quarters of a second who fills best",
            replace(_ACCELGEN, order=Order.FCFS, packing=Packing.FCFS),
        ),
        "accelgen-no-batch": Preset(
            "AccelGen /Batch: budget by the tightest deadline, strictly by slack",
            replace(_ACCELGEN, selection=Choice.IN_ORDER),
        ),
        # Ours with one of the three turned off, or the shortest first.
        "slack-no-chunk": Preset("ours with a fixed budget", Policy(chunking=Chunking.FIXED)),
        "slack-no-order": Preset("ours, first come, first served", Policy(Order.FCFS, packing=Packing.FCFS)),
        "slack-no-batch": Preset("ours strictly in order", Policy(selection=Choice.IN_ORDER)),
        "shortest": Preset(
            "ours with the shortest remaining first, strictly",
            Policy(Order.SHORTEST_REMAINING, selection=Choice.IN_ORDER),
        ),
    }
)


def preset(name: str) -> Preset:
    if name not in PRESETS:
        raise ConfigError(f"there is no preset {name!r:.40}: there are {', '.join(PRESETS)}{hint(name, PRESETS)}")
    return PRESETS[name]
