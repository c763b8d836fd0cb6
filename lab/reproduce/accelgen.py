"""AccelGen's figures (§3, §6): OPT-13B on an A100 with 12 GB for KV; with --full also OPT-175B on eight.

Prompts are 34, 52 and 14 % in [10, 512], (512, 4K] and (4K, 8K] tokens, outputs 51 and 49 % in [10, 512] and (512, 2K].
The first token of a prompt is due after the mean time that prompts of its length take alone, in groups of 512 tokens,
times 0.5 to 1.5: half of them cannot be in time. The other tokens are due every 0.1875 s times 0.75 to 1.25. The paper
has 20,000 requests, 8 in a second: about forty times what 12 GB for KV keep up with. So the figures have a second load,
and the systems take most of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from alignedserve.lab.reports.figure_rows import Better
from alignedserve.lab.reproduce.cells import Cells
from alignedserve.lab.reproduce.figure import Axis, Claim, Figure, Paper, Point, System, file
from alignedserve.loads.records.distribution import ratio

_CALM, _PAPERS, _LARGE = "0.2/s", "8/s", "OPT-175B, 8/s"
_REQUESTS = 20_000

_ACCEL_GEN = System("AccelGen", "accelgen")
# Memory for all of a prompt, and requests that were late once are no longer before all others.
_MENDED = ("schedule.room=growing", "schedule.late=decay")
_OURS = (System("aligned", "aligned"), System("aligned, refuses none", "aligned", options=("schedule.refuse_ttfts=0",)))
_BEST, _WORST = "AccelGen, mended", "ORCA"
_OTHERS = (
    System("Sarathi", "sarathi"),
    System("FastGen", "fastgen"),
    System("vLLM", "vllm-chunked"),
    System(_WORST, "orca"),
)
_SYSTEMS = (_ACCEL_GEN, System(_BEST, "accelgen", options=_MENDED), *_OTHERS, *_OURS)
_METHODS = ("Chunk", "Order", "Batch")
_WITHOUT = (System(f"/{name}", f"accelgen-no-{name.lower()}", options=_MENDED) for name in _METHODS)
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

_LOAD = Axis("load")


def _figure(
    number: str,
    axis: Axis,
    metric: str,
    systems: tuple[System, ...],
    *claims: Claim,
    finding: str,
    better: Better = Better.HIGHER,
    behind: str = "",
) -> Figure:
    title = f"{axis.label}, {'without a method' if systems is _ABLATIONS else 'all systems'}"
    return Figure(number, title, _LOAD, axis, systems, _POINTS, metric, claims, finding, better, behind)


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


def _falls(name: str, percent: float) -> Claim:
    return Claim(f"/{name} below AccelGen, mean, %", percent, lambda cells: cells.less(f"/{name}", _BEST))


def _grows(name: str, percent: float) -> Claim:
    return Claim(f"/{name} above AccelGen, mean, %", percent, lambda cells: -cells.less(f"/{name}", _BEST))


_THROUGHPUT, _GOODPUT = Axis("tokens in a second"), Axis("requests in a second that keep all promises")
_IN_TIME, _JCT = Axis("steps with all tokens in time", "%"), Axis("mean time of a request", "s")
_KV = Axis("KV memory that is allocated", "%")
_TOKENS_PER_S, _KEPT = "tokens_per_s", "papers.accelgen.goodput"
_STEPS, _END_TO_END, _ALLOCATED = "papers.accelgen.steps_in_slo", "rt.end_to_end_s.mean", "papers.accelgen.kv_allocated"

_REFUSES = (
    "It refuses requests that would wait twice their promise for others; refusing none, it is ahead or about equal."
)
_THRASHES = (
    "The opposite of the paper's effect, by the paper's own rule: AccelGen gives all free memory to pieces of "
    "prompts (Algorithm 2), so none is left for decodes to grow, and what leaves is recomputed, again and "
    "again."
)
_FIVE = (
    "12 GB hold five requests, and a step has room for all of them whatever its budget is: what a system serves "
    "follows from memory alone."
)
_NEVER_LATE = (
    "The device: steps take 30 to 45 ms, so no system misses a promise of 141 to 234 ms a token, not even at 30 % "
    "of the peak, where 768 tokens take more than 200 ms. In the paper two steps of three took longer than 187 "
    "ms."
)
_AS_IN_PAPER = (
    "Mended (memory for whole prompts, and a request that was late once is not before all others for ever) it "
    "shows the paper's effect at 0.2/s. At 8/s, forty times what the memory serves, hardly a request keeps its "
    "promises."
)

PAPER = Paper(
    "accelgen",
    "AccelGen",
    (
        _figure(
            "11a",
            _THROUGHPUT,
            _TOKENS_PER_S,
            _SYSTEMS,
            *_above(1.42, 11.21),
            finding=f"{_THRASHES} {_FIVE}",
            behind=_REFUSES,
        ),
        _figure("11b", _GOODPUT, _KEPT, _SYSTEMS, *_above(1.43, 13.71), finding=_AS_IN_PAPER),
        _figure("11c", _IN_TIME, _STEPS, _SYSTEMS, *_above(1.37, 1.9), finding=_NEVER_LATE),
        _figure("11d", _JCT, _END_TO_END, _SYSTEMS, *_below(1.61, 12.22), finding=_AS_IN_PAPER, better=Better.LOWER),
        _figure("11e", _KV, _ALLOCATED, _SYSTEMS, finding=_THRASHES, behind=_REFUSES),
        _figure(
            "12a",
            _THROUGHPUT,
            _TOKENS_PER_S,
            _ABLATIONS,
            _falls("Chunk", 97),
            _falls("Batch", 61),
            _falls("Order", 35),
            finding=_FIVE,
            behind=_REFUSES,
        ),
        _figure(
            "12b",
            _GOODPUT,
            _KEPT,
            _ABLATIONS,
            _falls("Order", 52),
            _falls("Chunk", 44),
            _falls("Batch", 27),
            finding="The paper's effect, but for /Chunk at 0.2/s: whole prompts alone have the earliest first tokens.",
        ),
        _figure(
            "12c",
            _IN_TIME,
            _STEPS,
            _ABLATIONS,
            _falls("Order", 42),
            _falls("Chunk", 28),
            _falls("Batch", 24),
            finding=_NEVER_LATE,
        ),
        _figure(
            "12d",
            _JCT,
            _END_TO_END,
            _ABLATIONS,
            _grows("Order", 17),
            _grows("Chunk", 31),
            _grows("Batch", 19),
            finding=f"/Order as in the paper. {_FIVE}",
            better=Better.LOWER,
        ),
        _figure(
            "12e",
            _KV,
            _ALLOCATED,
            _ABLATIONS,
            _falls("Order", 1),
            _falls("Chunk", 7),
            _falls("Batch", 11),
            finding=_FIVE,
            behind=_REFUSES,
        ),
    ),
    ("11b",),
)
