"""BROS' figures (§7): A100s of 40 GB, OPT-13B on two, OPT-30B on four; chats at a rate beside lots of documents.

The paper does not say how many documents a lot has: here it is 64. Chats have the
paper's promises, a first token within 0.4 s and a token every 0.2 s. The paper runs traces of ten minutes.
"""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.lab.reports.figure_rows import Better
from alignedserve.lab.reproduce.figure import Axis, Claim, Figure, Paper, Point, Rival

_OPT_13B, _OPT_30B = "a100-40-opt-13b-tp2", "a100-40-opt-30b-tp4"
_CHATS = "coserve,chat.ttft_s=0.4,chat.tbt_s=0.2,documents.in_flight=64"
_CHATS_ALONE = "chat,ttft_s=0.4,tbt_s=0.2,num_requests=100000"
_RATES, _OFTEN = (3, 5, 10, 12, 15), (5, 10, 15)
_USUAL_S, _FULL_S = 20, 600

_RATE = Axis("chats in a second")
_LATENCY, _DOCUMENTS = Axis("normalised latency of chats", "ms"), Axis("documents in a second")
_TTFT, _TPOT = Axis("chats with a first token in 0.4 s", "%"), Axis("chats with a token in 0.2 s, on average", "%")
_BROS, _VLLM, _ALIGNED = Rival("BROS", "bros"), Rival("vLLM", "vllm-fcfs"), Rival("aligned", "aligned")
_SYSTEMS = (_BROS, _VLLM, Rival("RR", "round-robin"), _ALIGNED)


_SHARE_GPT, _LMSYS = "ShareGPT", "LMSYS"  # sets of chats, and the workloads with their lengths
_WORKLOADS = {
    _SHARE_GPT: _CHATS,
    _LMSYS: f"{_CHATS},chat.prompt=lognormal:90.5:148.5:2048,chat.output=lognormal:237:228:1024",
}


def _point(rate: float, workload: str, profile: str, only_full: bool = False) -> Point:
    usual, full = (f"{workload},first_s={seconds}" for seconds in (_USUAL_S, _FULL_S))
    return Point(rate, usual, rate, profile, full=full, only_full=only_full)


def _less(other: str, paper: float) -> Claim:
    return Claim(f"BROS below {other}, mean, %", paper, lambda cells: cells.less("BROS", other))


def _times(other: str, paper: float) -> Claim:
    return Claim(f"BROS ÷ {other}, means", paper, lambda cells: cells.times_over("BROS", other))


@dataclass(frozen=True)
class _Measure:
    """A figure of chats beside documents."""

    title: str
    y: Axis
    metric: str
    better: Better = Better.HIGHER

    def of(self, number: str, chats: str, *claims: Claim, finding: str = "", behind: str = "") -> Figure:
        points = tuple(_point(rate, _WORKLOADS[chats], _OPT_13B, only_full=rate not in _OFTEN) for rate in _RATES)
        what = self.y, _SYSTEMS, points, self.metric
        return Figure(number, f"{self.title}, {chats}", _RATE, *what, claims, finding, self.better, behind)


_CHATS_LATE = _Measure("latency of chats beside documents", _LATENCY, "papers.bros.normalised_latency_s", Better.LOWER)
_DONE = _Measure("documents beside chats", _DOCUMENTS, "papers.bros.be_requests_per_s")
_FIRST_IN_TIME = _Measure("first tokens in time", _TTFT, "papers.bros.ttft_attainment")
_IN_TIME = _Measure("tokens in time", _TPOT, "papers.bros.tpot_attainment")


def _mean(label: str, paper: float) -> Claim:
    return Claim(f"{label}, mean, %", paper, lambda cells: 100 * cells.over(label), is_effect=False)


def _cache(number: str, axis: Axis, metric: str, paper: float) -> Figure:
    return Figure(
        number,
        "blocks from both ends, OPT-30B at 10 chats a second",
        _RATE,
        axis,
        (Rival("With", "bros"), Rival("Without", "bros-plain"), _ALIGNED),
        (_point(10, _CHATS, _OPT_30B),),
        metric,
        (Claim("with ÷ without", paper, lambda cells: cells.times("With", "Without", 10)),),
        "The computed A100s serve this rate with every chat in time, with and without; the paper's were"
        " beyond what they could serve.",
    )


_LESS_LOAD = (
    "The paper's vLLM was loaded so far that 1 % of its chats had a first token in "
    "time, and how many documents caused that it does not say."
)
_CACHE = (
    "its prefix cache, which finds nothing here: a step waits for the pool's word on each chat. Without it "
    "(`schedule.reuse=false`) both are equal, and both keep all promises there."
)
_CHATS_FIRST = "vLLM makes more documents by keeping only a sixth to a half of the chats in time."
_SHORT_STEPS = (
    "As computed a step takes 26 ms (median of `aligned`) and 0.16 s at most, so every system keeps "
    "0.2 s; the paper's steps must have taken several times as long."
)

PAPER = Paper(
    "bros",
    "BROS",
    (
        _CHATS_LATE.of(
            "10a-latency", _SHARE_GPT, _less("vLLM", 74.20), _less("RR", 54.31), finding=_LESS_LOAD, behind=_CACHE
        ),
        _DONE.of(
            "10a-documents",
            _SHARE_GPT,
            _less("vLLM", 11.29),
            _less("RR", 8.80),
            finding="At 15 chats a second memory is short, and chats take it from documents.",
            behind=_CHATS_FIRST,
        ),
        _CHATS_LATE.of("10d-latency", _LMSYS, _less("vLLM", 69.61), _less("RR", 25.77)),
        _DONE.of("10d-documents", _LMSYS, _less("vLLM", 17.67), _less("RR", 15.18), behind=_CHATS_FIRST),
        _FIRST_IN_TIME.of(
            "11a-ttft",
            _SHARE_GPT,
            _times("vLLM", 36.38),
            _times("RR", 11.75),
            _mean("vLLM", 1.28),
            _mean("RR", 10.55),
            finding=_LESS_LOAD,
        ),
        _IN_TIME.of(
            "11a-tpot", _SHARE_GPT, _times("vLLM", 1.73), _times("RR", 1.47), _mean("BROS", 65.49), finding=_SHORT_STEPS
        ),
        _FIRST_IN_TIME.of("11d-ttft", _LMSYS, _times("vLLM", 21.42), _times("RR", 14.23)),
        _IN_TIME.of("11d-tpot", _LMSYS, _times("vLLM", 2.62), _times("RR", 2.28), _mean("BROS", 75.38)),
        Figure(
            "12-latency",
            "latency without documents",
            _RATE,
            _LATENCY,
            (Rival("BROS", "bros-plain"), _VLLM, Rival("TGI", "tgi"), _ALIGNED),
            tuple(_point(rate, _CHATS_ALONE, _OPT_13B) for rate in (10, 25)),
            "papers.bros.normalised_latency_s",
            (_less("vLLM", 29.36),),
            better=Better.LOWER,
            behind=_CACHE,
        ),
        _cache("13-ttft", _TTFT, "papers.bros.ttft_attainment", 1.23),
        _cache("13-tpot", _TPOT, "papers.bros.tpot_attainment", 1.63),
    ),
    ("11a-ttft",),
)
