"""List the figures that tables show: their order, label, unit, and which direction is better."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from alignedserve.lab.reports.figures import RunFigures
from alignedserve.loads.figures.units import Unit


class Better(Enum):
    HIGHER = "higher"
    LOWER = "lower"
    NEITHER = "neither"  # for information only: comparisons leave it out


_PARTS = ("mean", "p50", "p90", "p95", "p99", "most")


@dataclass(frozen=True, slots=True)
class FigureRow:
    label: str
    path: str
    unit: Unit
    about: str  # what the figure means, for docs/reference/figures.md
    better: Better = Better.NEITHER
    compared: tuple[str, ...] = ()  # parts of a distribution that comparisons show; () for a single number
    is_distribution: bool = False

    def show(self, figures: RunFigures) -> str:
        if not self.is_distribution:
            return self.unit.show(figures.at(self.path))
        return "   ".join(f"{part} {self.unit.show(figures.at(f'{self.path}.{part}'))}" for part in _PARTS)

    def numbers(self, parts: tuple[str, ...]) -> Iterator[FigureRow]:
        """Yield a row for each number: for a distribution, a row for each of these parts."""
        if not self.is_distribution:
            yield self
            return
        for part in parts:
            yield replace(self, label=f"{self.label} {part}", path=f"{self.path}.{part}", is_distribution=False)


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    rows: tuple[FigureRow, ...]


def _count(label: str, path: str, about: str, better: Better = Better.NEITHER) -> FigureRow:
    return FigureRow(label, path, Unit.NUMBER, about, better)


def _share(label: str, path: str, about: str, better: Better = Better.HIGHER) -> FigureRow:
    return FigureRow(label, path, Unit.SHARE, about, better)


def _rate(label: str, path: str, about: str) -> FigureRow:
    return FigureRow(label, path, Unit.PER_SECOND, about, Better.HIGHER)


def _time(label: str, path: str, about: str, unit: Unit = Unit.SECONDS, better: Better = Better.LOWER) -> FigureRow:
    return FigureRow(label, path, unit, about, better)


def _times(label: str, path: str, about: str, unit: Unit, better: Better = Better.LOWER) -> FigureRow:
    return FigureRow(label, path, unit, about, better, ("p50", "p99"), is_distribution=True)


SECTIONS = (
    Section(
        "Requests",
        (
            _count("all", "requests.count", "requests that arrived"),
            _count("finished", "requests.finished", "requests that got their whole output"),
            _count("refused", "requests.refused", "requests that were turned away", Better.LOWER),
            _count("left", "requests.left", "requests whose client had no patience"),
            _count("broken", "requests.broken", "requests whose gateway died"),
            _count(
                "unfinished",
                "requests.unfinished",
                "requests that nothing had ended when the run ended",
                Better.LOWER,
            ),
            _count(
                "preemptions",
                "requests.preemptions",
                "how often a request gave up its memory after its first token and was computed again",
                Better.LOWER,
            ),
            _time("duration", "duration_s", "from the first arrival to the last end", better=Better.NEITHER),
            _rate("tokens", "tokens_per_s", "output tokens that reached clients, in a second"),
        ),
    ),
    Section(
        "Real-time (RT)",
        (
            _share(
                "attainment",
                "rt.attainment",
                "share of requests whose first token came within `ttft`, whose own P99 gap is within `tbt`, and that"
                " never stalled",
            ),
            _share("TTFT in time", "rt.ttft_attainment", "share that keeps the first of these"),
            _share(
                "P99 TBT in time",
                "rt.tbt_attainment",
                "share that keeps the second; a request of one token has no gap to break",
            ),
            _share(
                "both, stalls forgiven",
                "rt.p99_attainment",
                "attainment without the last: the P99 of a request's gaps forgives one gap in a hundred of any length",
            ),
            _share(
                "stalled",
                "rt.stalled",
                "share of requests with a gap that is longer than five times `tbt` and longer than a second",
                Better.LOWER,
            ),
            _share(
                "tokens in time",
                "rt.tokens_in_time",
                "share of single tokens in time; a request that did not finish counts one late token",
            ),
            _times("TTFT", "rt.ttft_s", "arrival to first token, of requests that got one", Unit.MILLISECONDS),
            _times("TBT", "rt.tbt_s", "gaps between tokens, of all requests together", Unit.MILLISECONDS),
            _times(
                "mean TPOT",
                "rt.mean_tpot_s",
                "of requests with two tokens or more: first to last token ÷ gaps",
                Unit.MILLISECONDS,
            ),
            _times("end to end", "rt.end_to_end_s", "arrival to end, of finished requests", Unit.SECONDS),
        ),
    ),
    Section(
        "Best-effort (BE)",
        (
            _rate("BE tokens", "be.tokens_per_s", "output tokens of finished requests in a second"),
            _rate("BE requests", "be.requests_per_s", "finished requests in a second"),
            _share("JCT attainment", "be.jct_attainment", "share that finished within its completion window"),
            _times("JCT", "be.jct_s", "arrival to end, of finished requests", Unit.SECONDS),
        ),
    ),
    Section(
        "Steps and copies",
        (
            _count(
                "steps",
                "steps.count",
                "forward passes of all workers; what a worker's death cut short is not counted",
            ),
            _count("prefill steps", "steps.prefill", "steps of prompts alone"),
            _count("decode steps", "steps.decode", "steps of decodes alone"),
            _count("mixed steps", "steps.mixed", "steps of both"),
            _times(
                "step time",
                "steps.seconds",
                "seconds of a step, by the simulator's truth",
                Unit.MILLISECONDS,
                Better.NEITHER,
            ),
            _times("step tokens", "steps.tokens", "tokens that a step runs", Unit.NUMBER, Better.NEITHER),
            _count(
                "prefix spread, mean",
                "steps.spread.mean",
                "longest less shortest prefix among the decodes of a step",
                Better.LOWER,
            ),
            _count("prefix spread, p90", "steps.spread.p90", "the same, 90th percentile", Better.LOWER),
            _share(
                "bubble",
                "steps.spread.bubble_share",
                "Σ(B·max C - ΣC) ÷ Σ(B·max C), over steps with B decodes of prefixes C",
                Better.LOWER,
            ),
            _share(
                "prediction error, p50",
                "steps.prediction.all.p50",
                "|predicted ÷ true - 1|, median over steps",
                Better.LOWER,
            ),
            _share("prediction error, p90", "steps.prediction.all.p90", "the same, 90th percentile", Better.LOWER),
            _share(
                "prompts computed",
                "prompts_computed",
                "prompt tokens of all steps ÷ those of requests that got a token: less with a prefix cache, more where"
                " prompts are computed again",
                Better.LOWER,
            ),
            _share(
                "workers busy",
                "mean_step_share",
                "share of the run that a worker spends in steps, mean over workers",
                Better.NEITHER,
            ),
            _count("copies", "copies.count", "of KV between devices and the pool, both ways", Better.LOWER),
            _count("copied tokens", "copies.tokens", "their tokens", Better.LOWER),
            _time("copying", "copies.seconds", "their seconds, added up"),
        ),
    ),
    Section(
        "The KV pool",
        (
            _share("pages of RT", "pool.rt", "share of pages that real-time requests alone hold", Better.NEITHER),
            _share("pages of BE", "pool.be", "that best-effort requests alone hold", Better.NEITHER),
            _share(
                "pages of both",
                "pool.shared",
                "that requests of both classes hold, whose prompts begin alike",
                Better.NEITHER,
            ),
            _share("idle pages", "pool.idle", "that are kept for prompts that begin as they do", Better.NEITHER),
            _share(
                "leased pages",
                "pool.leased",
                "that workers have, for prompts that are about to be stored",
                Better.NEITHER,
            ),
        ),
    ),
    Section(
        "As the papers count",
        (
            _rate(
                "AlignedServe decode tokens",
                "papers.alignedserve.decode_tokens_per_s",
                "decodes of all steps in a second",
            ),
            _time(
                "AlignedServe P99 TPOT",
                "papers.alignedserve.p99_tpot_s",
                "99th percentile of the seconds of steps with decodes, each step counted once",
                Unit.MILLISECONDS,
            ),
            _share("BROS TTFT ≤ 0.4 s", "papers.bros.ttft_attainment", "share of RT requests"),
            _share("BROS TPOT ≤ 0.2 s", "papers.bros.tpot_attainment", "share of RT requests, by their mean TPOT"),
            _share("BROS both", "papers.bros.attainment", "share of RT requests that keep both"),
            _time(
                "BROS normalised latency",
                "papers.bros.normalised_latency_s",
                "mean of end to end ÷ output tokens, of finished RT requests",
                Unit.MILLISECONDS,
            ),
            _rate("BROS BE requests", "papers.bros.be_requests_per_s", "finished BE requests in a second"),
            _time(
                "ALISE normalised latency",
                "papers.alise.normalised_latency_s",
                "the same mean, of all finished requests",
                Unit.MILLISECONDS,
            ),
            _share(
                "AccelGen steps in SLO",
                "papers.accelgen.steps_in_slo",
                "of the steps that made an RT token which reached its client, the share that made no late token. The"
                " n-th step that made a token for a request made its n-th token: exact while no worker dies",
            ),
            _share(
                "AccelGen JCT attainment",
                "papers.accelgen.jct_attainment",
                "share of all requests that finished within their own completion window",
            ),
            _rate(
                "AccelGen goodput",
                "papers.accelgen.goodput",
                "requests in a second that keep every promise of their class (RT: `ttft`, P99 `tbt`, `jct`; BE: `jct`)",
            ),
            _share(
                "AccelGen forward size ÷ budget",
                "papers.accelgen.budget_used",
                "tokens of a step ÷ most tokens its worker may run, mean over steps",
            ),
            _share(
                "AccelGen allocated ÷ total KV",
                "papers.accelgen.kv_allocated",
                "share of block pairs that requests have when a step begins; mean over the seconds of steps",
            ),
            _share("Apt-Serve attainment", "papers.apt_serve.attainment", "both in time, stalls forgiven"),
            _rate("Apt-Serve attained requests", "papers.apt_serve.attained_per_s", "such requests in a second"),
        ),
    ),
    Section(
        "The simulator",
        (
            _time("wall time", "speed.wall_s", "seconds that the run took to simulate", better=Better.NEITHER),
            _count(
                "simulated seconds per wall second", "speed.simulated_s_per_wall_s", "the run's duration ÷ wall time"
            ),
            FigureRow("steps per wall second", "speed.steps_per_wall_s", Unit.PER_SECOND, "steps ÷ wall time"),
        ),
    ),
)

ROWS = tuple(row for section in SECTIONS for row in section.rows)
NUMBERS = tuple(number for row in ROWS for number in row.numbers(_PARTS))
COMPARED = tuple(number for row in ROWS if row.better is not Better.NEITHER for number in row.numbers(row.compared))
