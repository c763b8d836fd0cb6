"""AccelGen's figures (§3, §6): OPT-13B on an A100 with 12 GB for KV; with --full also OPT-175B on eight.

Prompts are 34, 52 and 14 % in [10, 512], (512, 4K] and (4K, 8K] tokens, outputs 51 and 49 % in [10, 512] and (512, 2K].
The first token of a prompt is due after the mean time that prompts of its length take alone, in groups of 512 tokens,
times 0.5 to 1.5: half of the prompts cannot be in time. The other tokens are due every 0.1875 s times 0.75 to 1.25. The
paper has 20,000 requests, 8 in a second: about forty times what 12 GB for KV keep up with. So the figures have a second
load, and the systems take most of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from alignedserve.lab.loads.records.distribution import ratio
from alignedserve.lab.reports.figure_rows import Better
from alignedserve.lab.reproduce.figure import Axis, Cells, Claim, Figure, Paper, Point, Rival, file

_CALM, _PAPERS, _LARGE = "0.2/s", "8/s", "OPT-175B, 8/s"
_REQUESTS = 20_000

_ACCEL_GEN = Rival("AccelGen", "accelgen")
# Memory for all of a prompt, and requests that were late once are no longer before all others.
_MENDED = ("schedule.room=growing", "schedule.late=decay")
_OURS = (Rival("aligned", "aligned"), Rival("aligned, refuses none", "aligned", options=("schedule.refuse_ttfts=0",)))
_BEST, _WORST = "AccelGen, mended", "ORCA"
_OTHERS = (
    Rival("Sarathi", "sarathi"),
    Rival("FastGen", "fastgen"),
    Rival("vLLM", "vllm-chunked"),
    Rival(_WORST, "orca"),
)
_SYSTEMS = (_ACCEL_GEN, Rival(_BEST, "accelgen", options=_MENDED), *_OTHERS, *_OURS)
_METHODS = ("Chunk", "Order", "Batch")
_WITHOUT = (Rival(f"/{name}", f"accelgen-no-{name.lower()}", options=_MENDED) for name in _METHODS)
_ABLATIONS = (_SYSTEMS[1], *_WITHOUT, *_OURS)


def _point(x: str, rate: float, usual_s: float, model: str, profile: str, only_full: bool = False) -> Point:
    workload = file(f"accelgen-{model}.yaml")
    usual, full = (f"{workload},first_s={seconds:g}" for seconds in (usual_s, _REQUESTS / rate))
    return Point(x, usual, rate, profile, full=full, only_full=only_full)


_POINTS = (
    _point(_CALM, 0.2, 100, "opt-13b", "a100-40-opt-13b-tp1"),
    _point(_PAPERS, 8, 3, "opt-13b", "a100-40-opt-13b-tp1"),
    _point(_LARGE, 8, 3, "opt-175b", "a100-80-opt-175b-tp8", only_full=True),
)

_MEASURES = {  # letter of a figure -> its axis, its metric, and what is better
    "a": (Axis("tokens in a second"), "tokens_per_s", Better.HIGHER),
    "b": (Axis("requests in a second that keep all promises"), "papers.accelgen.goodput", Better.HIGHER),
    "c": (Axis("steps with all tokens in time", "%"), "papers.accelgen.steps_in_slo", Better.HIGHER),
    "d": (Axis("mean time of a request", "s"), "rt.end_to_end_s.mean", Better.LOWER),
    "e": (Axis("KV memory that is allocated", "%"), "papers.accelgen.kv_allocated", Better.HIGHER),
}


def _figure(number: str, *claims: Claim, finding: str, behind: str = "") -> Figure:
    """Return a figure of all systems (11) or of the methods that AccelGen may lack (12)."""
    axis, metric, better = _MEASURES[number[-1]]
    systems, what = (_SYSTEMS, "all systems") if number.startswith("11") else (_ABLATIONS, "without a method")
    title = f"{axis.label}, {what}"
    return Figure(number, title, Axis("load"), axis, systems, _POINTS, metric, claims, finding, better, behind)


def _against(other: str, paper: float, label: str, x: str, of_others: Callable[[Sequence[float]], float]) -> Claim:
    """Return the claim that AccelGen has `paper` times what another system has."""

    def ratio_of(cells: Cells) -> float:
        others = of_others([cells.at(system.label, x) for system in _OTHERS])
        return ratio(cells.at(label, x), others)

    return Claim(f"{label} ÷ {other}, {x}", paper, ratio_of)


def _above(least: float, most: float) -> tuple[Claim, ...]:
    """Return the claims that AccelGen has more than all others."""
    return (
        _against("the best other", least, "AccelGen", _PAPERS, max),
        _against("the best other", least, _BEST, _CALM, max),
        _against("the worst", most, _BEST, _PAPERS, min),
    )


def _below(least: float, most: float) -> tuple[Claim, ...]:
    """Return the claims that AccelGen takes a smaller share of the time than all others."""
    return (
        _against("the best other", 1 / least, "AccelGen", _PAPERS, min),
        _against("the best other", 1 / least, _BEST, _CALM, min),
        _against("the worst", 1 / most, _BEST, _PAPERS, max),
    )


def _mean(change: str, **paper: float) -> Iterator[Claim]:
    """Yield by how many percent the paper has each ablation below or above AccelGen."""
    sign = 1 if change == "below" else -1
    for method, percent in paper.items():
        text = f"/{method} {change} AccelGen, mean, %"
        yield Claim(text, percent, lambda cells, method=method: sign * cells.less(f"/{method}", _BEST))


_REFUSES = (
    "It refuses requests that would wait twice their promise for others; refusing none, it is ahead or about equal."
)
_THRASHES = (
    "By the paper's own rule AccelGen gives all free memory to pieces of "
    "prompts (Algorithm 2), so none is left for decodes to grow, and what leaves is recomputed, again and "
    "again."
)
_FIVE = (
    "12 GB hold five requests, and a step has room for all of them whatever its budget is: what a system serves "
    "follows from memory alone."
)
_NEVER_LATE = (
    "Steps take 30 to 45 ms, so no system misses a promise of 141 to 234 ms a token, not even at 30 % "
    "of the peak, where 768 tokens take more than 200 ms. In the paper two steps of three took longer than 187 "
    "ms."
)
_AS_IN_PAPER = (
    "Mended (memory for whole prompts, and a request that was late once is not before all others for ever) it "
    "is ahead at 0.2/s. At 8/s, forty times what the memory serves, hardly a request keeps its "
    "promises."
)

PAPER = Paper(
    "accelgen",
    "AccelGen",
    (
        _figure("11a", *_above(1.42, 11.21), finding=f"{_THRASHES} {_FIVE}", behind=_REFUSES),
        _figure("11b", *_above(1.43, 13.71), finding=_AS_IN_PAPER),
        _figure("11c", *_above(1.37, 1.9), finding=_NEVER_LATE),
        _figure("11d", *_below(1.61, 12.22), finding=_AS_IN_PAPER),
        _figure("11e", finding=_THRASHES, behind=_REFUSES),
        _figure("12a", *_mean("below", Chunk=97, Batch=61, Order=35), finding=_FIVE, behind=_REFUSES),
        _figure(
            "12b",
            *_mean("below", Order=52, Chunk=44, Batch=27),
            finding="At 0.2/s whole prompts alone have the earliest first tokens.",
        ),
        _figure("12c", *_mean("below", Order=42, Chunk=28, Batch=24), finding=_NEVER_LATE),
        _figure("12d", *_mean("above", Order=17, Chunk=31, Batch=19), finding=_FIVE),
        _figure("12e", *_mean("below", Order=1, Chunk=7, Batch=11), finding=_FIVE, behind=_REFUSES),
    ),
    ("11b",),
)
