"""These systems as settings: `--preset NAME`. `source` cites the paper, `differs` says what is not as there."""

from __future__ import annotations

from collections.abc import Mapping

from alignedserve.config.presets import Preset, PresetSettings

_FCFS: PresetSettings = {
    "schedule.scheduler": "fcfs",
    "schedule.chunking": "fixed",
    "schedule.room": "whole",
    "schedule.grouping": "fcfs",
    "schedule.predictor": "constant",  # service by arrival needs no prediction
    "schedule.refuse_ttfts": 0.0,
    "schedule.helps": False,
}
_GROWING: PresetSettings = {"schedule.room": "growing"}
_RECOMPUTES: PresetSettings = {"schedule.evict": False}  # what has to leave is recomputed
_NEW: PresetSettings = {"schedule.reuse": False}  # these systems have no prefix cache
_ORCA_MEMORY: PresetSettings = {"schedule.reserve": 8192}
_BROS: PresetSettings = {
    "engine.max_batch": 256,  # the most that B_curr grows to; what makes it smaller is missing
    "schedule.scheduler": "bros",
    "schedule.room": "growing",
    "schedule.grouping": "fcfs",
    "schedule.late": "keep",
    "schedule.predictor": "constant",
    "schedule.refuse_ttfts": 0.0,
    "schedule.helps": False,
    **_NEW,
}
_ALISE: PresetSettings = {
    "schedule.scheduler": "alise",
    "schedule.chunking": "fixed",
    "schedule.room": "growing",
    "schedule.grouping": "fcfs",
    "schedule.late": "keep",
    "schedule.refuse_ttfts": 0.0,
    "schedule.helps": False,
    "engine.max_step_tokens": 8192,
    **_NEW,
}
_ACCELGEN: PresetSettings = {
    "schedule.scheduler": "accelgen",
    "schedule.room": "chunks",
    "schedule.grouping": "fcfs",
    "schedule.late": "keep",
    "schedule.predictor": "constant",
    "schedule.refuse_ttfts": 0.0,
    "schedule.helps": False,
    **_RECOMPUTES,
    **_NEW,
}

_APT_SERVE: PresetSettings = {
    **_FCFS,
    **_GROWING,
    **_RECOMPUTES,
    **_NEW,
    "schedule.scheduler": "apt_serve",
    "schedule.memory": "hybrid",
    "schedule.chunking": "none",
    "schedule.late": "drop_last",
    "engine.max_step_tokens": 8192,
}

PRESETS: Mapping[str, Preset] = {
    "aligned-hybrid": Preset(
        "the default, some requests kept as hidden vectors: half the memory, and time in each step (Apt-Serve)",
        {"schedule.memory": "hybrid"},
    ),
    "aligned-shared": Preset(
        "the default with blocks from both ends: chats take slots of other requests and give them back (BROS)",
        {"schedule.memory": "two_ended"},
    ),
    "aligned-no-order": Preset("the default, first come, first served", {"schedule.scheduler": "fcfs"}),
    "aligned-multi-resource": Preset(
        "the default, of about as urgent prompts those that best fill time and memory (AccelGen)",
        {"schedule.scheduler": "best_fit"},
    ),
    "shortest": Preset("the default with the shortest remaining first, strictly", {"schedule.scheduler": "shortest"}),
    "fcfs": Preset(
        "first come, first served: decodes, and chunks of prompts beside them; memory for the longest output", _FCFS
    ),
    "vllm-fcfs": Preset(
        "vLLM without chunked prefill (its V0): whole prompts alone whenever one fits, else decodes",
        {**_FCFS, **_GROWING, **_RECOMPUTES, "schedule.scheduler": "vllm_v0", "schedule.chunking": "none"}
        | {"engine.max_step_tokens": 8192},
        source="PagedAttention §4.5; vLLM V0",
    ),
    "vllm-chunked": Preset(
        "vLLM with chunked prefill (its V1): decodes, then chunks up to 2,048 tokens; recomputes the newest",
        {**_FCFS, **_GROWING, **_RECOMPUTES, "schedule.scheduler": "vllm_v1", "engine.max_step_tokens": 2048},
        source="vLLM V1",
    ),
    # 8 in a step, and 8K, as in BROS §7; the budget is so large that no prompt is cut.
    "orca": Preset(
        "Orca: by arrival, 8 in a step, whole prompts beside decodes; memory for 8,192 tokens each",
        {**_FCFS, **_NEW, **_ORCA_MEMORY, "schedule.scheduler": "orca"}
        | {"engine.max_batch": 8, "engine.max_step_tokens": 8192},
        source="Orca §4.1, §4.2",
        differs="8,192 tokens are reserved for each request, or all of a smaller device",
    ),
    "sarathi": Preset(
        "Sarathi-Serve: decodes, running chunks, then new ones, in fixed 512 tokens; several long prompts at once",
        {
            **_FCFS,
            **_GROWING,
            **_RECOMPUTES,
            **_NEW,
            "schedule.scheduler": "sarathi",
            "engine.max_step_tokens": 512,
        },
        source="Sarathi-Serve §4.3",
        differs="its budget is 512; how it is found (by profiling, for each TBT) is missing",
    ),
    "fastgen": Preset(
        "DeepSpeed-FastGen: the same 512 tokens filled by splitting and composing prompts; memory chunk by chunk",
        {**_FCFS, **_RECOMPUTES, **_NEW, "schedule.scheduler": "fastgen", "schedule.room": "chunks"}
        | {"engine.max_step_tokens": 512},
        source="DeepSpeed-FastGen §3",
        differs="it recomputes where its paper admits no request",
    ),
    # FastServe (2023) §4.1 skip-join MLFQ, §4.2 swapping, with the memory that BROS §7 and ALISE §4 give it: it is
    # built on Orca. Its ablation is --set schedule.evict=false, which recomputes.
    "fastserve": Preset(
        "FastServe: five levels by service, lower ones swapped out for higher ones; memory for 8,192 tokens each",
        {**_FCFS, **_NEW, **_ORCA_MEMORY, "schedule.scheduler": "fastserve", "engine.max_step_tokens": 8192},
        source="FastServe §4.1, §4.2",
        differs="8,192 tokens are reserved for each request. A request is swapped out when its memory is wanted, "
        "not ahead of that, and comes back by arrival. 32 prompt tokens count as a step of service; no "
        "request rises with age",
    ),
    # DistServe (OSDI 24) §4.3: both kinds first come, first served; decode workers pull KV when they have room, and
    # prefill workers keep it until then.
    "distserve": Preset(
        "DistServe: prompts and decodes on workers of their own, each by arrival; KV is pulled by those with room",
        {**_FCFS, **_GROWING, **_NEW, "schedule.scheduler": "distserve", "schedule.chunking": "none"}
        | {"engine.max_step_tokens": 8192}
        | {"schedule.handoff": "device", "schedule.prefetch": False}
        | {"topology": "1+1", "transport": "collective"},
        source="DistServe §4.3",
        differs="its search for the number of workers and their parallelism is missing",
    ),
    "round-robin": Preset(
        "real-time and best-effort requests in alternate steps, each by arrival; the newest request is recomputed",
        {**_FCFS, **_GROWING, **_RECOMPUTES, **_NEW, "schedule.scheduler": "round_robin"},
        source="BROS §7.1",
    ),
    "tgi": Preset(
        "TGI: by arrival, whole prompts first, as soon as 1.2 times as many prompts wait as requests decode",
        {**_FCFS, **_NEW, "schedule.scheduler": "tgi", "schedule.chunking": "none"} | {"engine.max_step_tokens": 8192},
        source="text-generation-inference, waiting_served_ratio and max_waiting_tokens",
        differs="memory is given when a prompt waits for its step, not with the step",
    ),
    "mlfq": Preset(
        "five levels by tokens already served, no prediction; the request served most is recomputed",
        {**_FCFS, **_GROWING, **_RECOMPUTES, **_NEW, "schedule.scheduler": "mlfq"},
        source="ALISE §4.1; FastServe §4.1",
        differs="a request that leaves for lack of memory is recomputed, not swapped",
    ),
    # AlignedServe §3.3 (Density First Search), §3.2 (prompts apart, KV through host memory, the candidate batch and
    # requests that leave on the prefill worker), §3.4 (which request leaves). No deadlines: no request is pinned.
    # Its ablations are --set schedule.grouping=fcfs and --set schedule.prefetch=false.
    "alignedserve-paper": Preset(
        "AlignedServe alone: whole prompts by arrival, then decodes of about one length; no request is pinned",
        {**_FCFS, **_GROWING, **_NEW, "schedule.chunking": "none", "schedule.grouping": "aligned"}
        | {
            "schedule.scheduler": "longest",
            "schedule.handoff": "pool",
            "schedule.pinning": False,
            "schedule.candidate_share": 0.5,  # a batch takes 0.4 of a decode worker's device
            "engine.max_step_tokens": 8192,
            "topology": "1+1",
            "transport": "collective",
        },
        source="AlignedServe §3.2-3.4",
        differs="a batch slides to the tightest lengths near it; the longest wait of a node is 30 s",
    ),
    "bros": Preset(
        "BROS: urgent real-time first, best-effort in what is left; blocks from both ends",
        {**_BROS, "schedule.memory": "two_ended"},
        source="BROS §4.2, §5",
        differs="prompts run in chunks beside decodes, which its vLLM did not. Steps take up to 256 requests from "
        "the start, and one token is due at a time: its B_curr, which grows from 128, its token groups, "
        "and documents that take the place of a chat in a step are missing",
    ),
    # The paper's own ablation (BROS §7.4): a request that gives up memory is recomputed.
    "bros-plain": Preset(
        "BROS with plain blocks: best-effort memory is taken as a whole",
        {**_BROS, **_RECOMPUTES},
        source="BROS §7.4",
    ),
    # ALISE §3.1 (lengths, levels, ageing, doubling), §3.2 (Algorithm 2, int8 of waiting requests), §3.3 (whole
    # prompts beside decodes).
    "alise": Preset(
        "ALISE: five levels by predicted time; lower ones are swapped out for higher ones, as int8",
        {**_ALISE, "kvpool.compression": "int8"},
        source="ALISE §3.1, §3.2",
        differs="a prompt's time counts as a step per 32 tokens, not by a fit. Pages become int8 in the pool, "
        "behind the copy. The limit M is what memory and seats hold; requests of one level, whose EWT the "
        "paper makes equal, take nothing from each other. Age counts from arrival, so that a request that "
        "rose stays",
    ),
    "alise-defer": Preset(
        "ALISE /Defer: newcomers wait until there is memory for their whole output",
        {**_ALISE, "schedule.room": "whole"},
        source="ALISE §4.3",
    ),
    "alise-recompute": Preset(
        "ALISE /Recompute: a request that has to leave is recomputed",
        {**_ALISE, **_RECOMPUTES},
        source="ALISE §4.3",
    ),
    # Apt-Serve §4.2, §5. In a step of decodes with memory for all of them no request changes.
    "apt-serve": Preset(
        "Apt-Serve: memory to the requests pending longest for it, as KV or hidden vectors; steps of one type",
        _APT_SERVE,
        source="Apt-Serve §4.2, §5",
        differs="hidden becomes KV by projection, where the paper computes it again; a block for each seated "
        "request stays free. Models without hidden vectors need --set schedule.memory=weighed, which is "
        "apt-serve-kv. How its ablation FCFS keeps hidden vectors the paper does not say: vllm-fcfs keeps "
        "none",
    ),
    "apt-serve-kv": Preset(
        "Apt-Serve with KV only: the choice of requests alone",
        {**_APT_SERVE, "schedule.memory": "weighed"},
        source="Apt-Serve §6.5",
    ),
    "apt-serve-s": Preset(
        "Apt-Serve-S: the same, with chunks of prompts beside decodes in fixed 512 tokens",
        {**_APT_SERVE, "schedule.chunking": "fixed", "engine.max_step_tokens": 512},
        source="Apt-Serve §6.7",
    ),
    "accelgen": Preset(
        "AccelGen: budget by the tightest deadline, order by slack, best fit of tokens and memory; its formulas",
        _ACCELGEN,
        source="AccelGen §4.2, §4.3, §4.4",
        differs="preemption times are missing; an urgent request takes another's place in the step, not its memory",
    ),
    # Without AccelGen's first method prompts are whole and run alone, as in the vLLM that AccelGen builds on.
    "accelgen-no-chunk": Preset(
        "AccelGen /Chunk: whole prompts alone, by slack, the best fit of tokens and memory",
        {**_ACCELGEN, **_GROWING, "schedule.chunking": "none", "engine.max_step_tokens": 8192},
        source="AccelGen §6.3",
    ),
    "accelgen-no-order": Preset(
        "AccelGen /Order: by arrival; within three quarters of a second the best fit of tokens and memory",
        {**_ACCELGEN, "schedule.scheduler": "accelgen_no_order"},
        source="AccelGen §6.3",
    ),
    "accelgen-no-batch": Preset(
        "AccelGen /Batch: budget by the tightest deadline, strictly by slack",
        {**_ACCELGEN, "schedule.scheduler": "accelgen_no_batch"},
        source="AccelGen §6.3",
    ),
}
