"""AlignedServe's figures (§2.3, §2.4, §4): H100s with NVLink, OPT-13B, no deadlines.

Each system has two GPUs. Requests are best-effort, since nothing in the paper has a deadline, and come all at once:
grouping needs many that wait. The application workloads are drawn, with the mean and the deviation of their lengths.
"""

from __future__ import annotations

from alignedserve.lab.reports.figure_rows import Better
from alignedserve.lab.reproduce.figure import Axis, Cells, Claim, Figure, Paper, Point, Rival, file

_OPT_13B, _LLAMA_7B = "h100-opt-13b-tp1", "h100-llama-2-7b-tp1"
_DECODED = "papers.alignedserve.decode_tokens_per_s"
_P99_STEP = "papers.alignedserve.p99_tpot_s"
_THROUGHPUT, _STEP = Axis("decoded tokens in a second"), Axis("P99 of a step with decodes", "ms")

_PAPERS_OWN = Rival("AlignedServe", "alignedserve-paper", "1+1")
_VLLM, _DIST_SERVE = Rival("vLLM", "vllm-chunked", "2xcolocated"), Rival("DistServe", "distserve", "1+1")
_FAST_GEN = Rival("FastGen", "fastgen", "2xcolocated")
_OURS = (Rival("aligned", "aligned", "2xcolocated"), Rival("aligned, 1+1", "aligned", "1+1"))
_SYSTEMS = (_PAPERS_OWN, _VLLM, _DIST_SERVE, _FAST_GEN, *_OURS)

# --- §2: batches of unequal lengths on one GPU


def _batch(long: int) -> Point:
    short = "sizes:service=be,prompt=32,output=600,arrivals=at_once,num_requests=64"
    return Point(long, file(f"batch-of-64-with-{long}-long.yaml") if long else short, profile=_LLAMA_7B)


_ONE = Figure(
    "1",
    "time of a step of 64 requests, some of which have prompts of 4,096 tokens",
    Axis("long prompts among 64"),
    _STEP,
    (
        Rival("vLLM", "vllm-fcfs"),
        Rival("vLLM, all wait for the longest", "vllm-fcfs", profile=file("h100-llama-2-7b-unequal-100.yaml")),
        Rival("aligned", "aligned"),
    ),
    tuple(map(_batch, (0, 1, 2, 4))),
    _P99_STEP,
    finding=(
        "One long prompt makes a step 38 % longer, though the batch reads 10 % more KV (factors "
        "that were measured where long prefixes are four times as long), and four make it 47 % longer; "
        "where all requests wait for the longest it takes 4.3 times as long. The paper gives its numbers "
        "in the picture only."
    ),
    better=Better.LOWER,
    behind=(
        "four prompts of 4,096 tokens run in chunks of 2,048 beside decodes, and these steps are the "
        "longest percent of all; vLLM ran the prompts before any decode."
    ),
)

_GROUPS = (10, 1930, 3790)
_ALL = "all"


def _group(prompt: int) -> Point:
    return Point(
        str(prompt), f"sizes:service=be,prompt={prompt},output=100,arrivals=at_once,num_requests=64", profile=_LLAMA_7B
    )


_THREE = Figure(
    "3",
    "time of a token in batches of 64 of one length, and of 64 lengths",
    Axis("tokens of a prompt"),
    Axis("median step", "ms"),
    _ONE.systems,
    (*map(_group, _GROUPS), Point(_ALL, f"trace:{file('batch-of-64-lengths.csv')},service=be", profile=_LLAMA_7B)),
    "steps.seconds.p50",
    finding=(
        "The device computes 64 lengths as fast as their mean, and only where "
        "requests wait for the longest (unequal_share 1) a batch of one length is quicker, 30 ms against "
        "52. Of 3,790 tokens 64 prompts do not fit in the memory at once."
    ),
    better=Better.LOWER,
)

# --- §4: mixes of short and long requests

_MIX = "mix:service=be,short={short},arrivals=at_once,num_requests="
_USUAL, _FULL = "400,output=32-224", "2000"  # requests, and outputs
_SHORT, _OFTEN = (70, 75, 80, 85, 90, 95), (70, 95)  # percent of the requests


def _mixed(percent: float, profile: str = _OPT_13B, x: float | None = None, only_full: bool = False) -> Point:
    usual, full = (_MIX.format(short=percent / 100) + requests for requests in (_USUAL, _FULL))
    return Point(percent if x is None else x, usual, profile=profile, full=full, only_full=only_full)


_MIXES = tuple(_mixed(percent, only_full=percent not in _OFTEN) for percent in _SHORT)
_OF_SHORT = Axis("short requests", "%")


def _times(other: str, paper: float, at: float | str) -> Claim:
    return Claim(
        f"AlignedServe ÷ {other} at {at} (paper: OPT-2.7B)", paper, lambda cells: cells.times("AlignedServe", other, at)
    )


def _lower(other: str) -> Claim:
    text = f"{other} ÷ AlignedServe, most (the paper: of all systems)"
    return Claim(text, 3.05, lambda cells: cells.most_times(other, "AlignedServe"))


_SEVEN = Figure(
    "7",
    "decode throughput against the mix of short and long requests",
    _OF_SHORT,
    _THROUGHPUT,
    _SYSTEMS,
    _MIXES,
    _DECODED,
    (_times("vLLM", 1.32, 95), _times("DistServe", 1.35, 95), _times("FastGen", 1.85, 95)),
    finding=(
        "Unequal lengths cost the computed device little (figure 14-unequal). "
        "And one GPU has all decodes, where vLLM, FastGen and `aligned` decode on both."
    ),
)
_NINE = Figure(
    "9",
    "P99 of a token's time against the mix of short and long requests",
    _OF_SHORT,
    _STEP,
    _SYSTEMS,
    _MIXES,
    _P99_STEP,
    (_lower("vLLM"), _lower("DistServe"), _lower("FastGen")),
    finding=(
        "Decodes of vLLM and FastGen wait for prompts in their steps; DistServe keeps them apart, "
        "as AlignedServe does. `aligned` is as slow as vLLM, also as `1+1`, where the prefill "
        "worker decodes: documents have no time for a token, so their prompts fill steps with decodes."
    ),
    better=Better.LOWER,
)

# --- §4: application workloads

_SHARE_GPT, _LONG_BENCH, _AZURE = "ShareGPT", "LongBench", "Azure"
_LENGTHS = {
    _SHARE_GPT: "prompt=lognormal:223:256:2048,output=lognormal:235:269:1024",
    _LONG_BENCH: "prompt=lognormal:8000:4500:30000,output=lognormal:90:120:512",
    _AZURE: "prompt=lognormal:1243:1100:7437,output=lognormal:217:250:1000",
}


def _application(name: str) -> Point:
    usual, full = (
        f"sizes:service=be,{_LENGTHS[name]},context=32768,arrivals=at_once,num_requests={number}"
        for number in (200, 2000)
    )
    return Point(name, usual, profile=_OPT_13B, full=full)


_APPLICATIONS = tuple(map(_application, _LENGTHS))


def _most_at(name: str, paper: float) -> Claim:
    def most(cells: Cells) -> float:
        return max(cells.times("AlignedServe", other.label, name) for other in (_VLLM, _DIST_SERVE, _FAST_GEN))

    return Claim(f"AlignedServe ÷ the slowest of the others, {name}", paper, most)


_EIGHT = Figure(
    "8",
    "decode throughput of applications",
    Axis("lengths"),
    _THROUGHPUT,
    _SYSTEMS,
    _APPLICATIONS,
    _DECODED,
    (_most_at(_LONG_BENCH, 1.98), _most_at(_SHARE_GPT, 1.35), _most_at(_AZURE, 1.98)),
)
_TEN = Figure(
    "10",
    "P99 of a token's time, applications",
    Axis("lengths"),
    _STEP,
    _SYSTEMS,
    _APPLICATIONS,
    _P99_STEP,
    better=Better.LOWER,
    behind="prompts run in steps with decodes, as in figure 9.",
)

# --- §4.4: ablations

_NO_PREFETCH = Rival("w/o P", "alignedserve-paper", "1+1", ("schedule.prefetch=false",))
_NEITHER = Rival("w/o P&B", "alignedserve-paper", "1+1", ("schedule.prefetch=false", "schedule.grouping=fcfs"))
_NO_GROUPING = Rival("w/o B", "alignedserve-paper", "1+1", ("schedule.grouping=fcfs",))
_FOURTEEN = Figure(
    "14",
    "decode throughput without prefetch (P) and without grouping (B)",
    Axis("lengths"),
    _THROUGHPUT,
    (_PAPERS_OWN, _NO_PREFETCH, _NEITHER, *_OURS),
    (_application(_AZURE),),
    _DECODED,
    (
        Claim("without prefetch, less by %", 14.73, lambda cells: cells.less("w/o P", "AlignedServe"), "w/o P"),
        Claim("without both, a further %", 28.51, lambda cells: cells.less("w/o P&B", "w/o P"), "w/o P&B"),
    ),
    finding=(
        "Copies go beside the steps with and without it, so the decode GPU waits for KV 0.2 % "
        "of the time and prefetching has nothing left to hide; between steps it would wait 6 % with it and 13 % "
        "without. Unequal lengths cost the computed device too little (figure 14-unequal)."
    ),
)
_UNEQUAL = Figure(
    "14-unequal",
    "decode throughput where unequal lengths cost more than on the computed device",
    Axis("share of the way from the mean to the longest prefix", "%"),
    _THROUGHPUT,
    (_PAPERS_OWN, _NO_GROUPING, _DIST_SERVE, _OURS[1]),
    tuple(
        _mixed(95, file(f"h100-opt-13b-unequal-{share}.yaml"), x=share, only_full=share == 25)
        for share in (10, 25, 50, 100)
    ),
    _DECODED,
    (Claim("AlignedServe ÷ DistServe at 100", 1.35, lambda cells: cells.times("AlignedServe", "DistServe", 100)),),
    finding=(
        "From a share of about 10 % on AlignedServe decodes 13 % more than DistServe; between "
        "10 and 50 % it passes the paper's 1.35. As computed, with measured shares (figure 7), it is 5 % more."
    ),
)

PAPER = Paper(
    "alignedserve", "AlignedServe", (_ONE, _THREE, _SEVEN, _EIGHT, _NINE, _TEN, _FOURTEEN, _UNEQUAL), ("14-unequal",)
)
