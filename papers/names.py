"""The name of each scheduler, ours among them."""

from __future__ import annotations

from enum import Enum


class SchedulerName(str, Enum):
    """A scheduler: ours, or another system's."""

    ALIGNED = "aligned"  # by promises; chats take the time, the seats and the memory of documents (BROS §4.2)
    BEST_FIT = "best_fit"  # the same; among about equally urgent chats, the best fill of what is left (AccelGen §4.4)
    BROS = "bros"  # the same as ALIGNED; chats by the slack that all their work leaves (BROS §4.1)
    SHORTEST = "shortest"  # the shortest remaining request first
    ALISE = "alise"  # by five levels of predicted steps; lower levels are swapped out for higher levels
    ACCELGEN = "accelgen"  # by slack, with the budget and the best fit of AccelGen's own formulas
    ACCELGEN_NO_BATCH = "accelgen_no_batch"  # the same, strictly by slack (AccelGen §6.3, /Batch)
    ACCELGEN_NO_ORDER = "accelgen_no_order"  # the same as ACCELGEN, by arrival (AccelGen §6.3, /Order)
    FCFS = "fcfs"  # by arrival; the newest request leaves where memory is short
    VLLM_V0 = "vllm_v0"  # the same: whole prompts alone whenever one fits, else decodes
    VLLM_V1 = "vllm_v1"  # the same: decodes, then chunks of prompts
    ORCA = "orca"  # the same: whole prompts beside decodes
    SARATHI = "sarathi"  # the same: decodes, then chunks of prompts that have begun, then of new ones
    FASTGEN = "fastgen"  # the same: prompts split and composed, with memory chunk by chunk
    DISTSERVE = "distserve"  # the same: on prefill workers and decode workers apart
    LONGEST = "longest"  # by arrival; the longest request of the old batch leaves (AlignedServe §3.4)
    ROUND_ROBIN = "round_robin"  # chats and documents in alternate steps, each by arrival
    MLFQ = "mlfq"  # by five levels of service; the request that was served most leaves
    FASTSERVE = "fastserve"  # the same; long prompts begin in lower levels, which are swapped out for higher levels
    APT_SERVE = "apt_serve"  # memory by pending time per memory (Apt-Serve §5)
    TGI = "tgi"  # by arrival; whole prompts interrupt decodes once enough prompts wait
