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


def _count(label: str, path: str, better: Better = Better.NEITHER) -> FigureRow:
    return FigureRow(label, path, Unit.NUMBER, better)


def _share(label: str, path: str, better: Better = Better.HIGHER) -> FigureRow:
    return FigureRow(label, path, Unit.SHARE, better)


def _rate(label: str, path: str) -> FigureRow:
    return FigureRow(label, path, Unit.PER_SECOND, Better.HIGHER)


def _time(label: str, path: str, unit: Unit = Unit.SECONDS, better: Better = Better.LOWER) -> FigureRow:
    return FigureRow(label, path, unit, better)


def _times(label: str, path: str, unit: Unit, better: Better = Better.LOWER, shown: str = "p50 p99") -> FigureRow:
    return FigureRow(label, path, unit, better, tuple(shown.split()), is_distribution=True)


SECTIONS = (
    Section(
        "Requests",
        (
            _count("all", "requests.count"),
            _count("finished", "requests.finished"),
            _count("refused", "requests.refused", Better.LOWER),
            _count("left", "requests.left"),
            _count("broken", "requests.broken"),
            _count("unfinished", "requests.unfinished", Better.LOWER),
            _count("preemptions", "requests.preemptions", Better.LOWER),
            _time("duration", "duration_s", better=Better.NEITHER),
            _rate("tokens", "tokens_per_s"),
        ),
    ),
    Section(
        "Real-time (RT)",
        (
            _share("attainment", "rt.attainment"),
            _share("TTFT in time", "rt.ttft_attainment"),
            _share("P99 TBT in time", "rt.tbt_attainment"),
            _share("both, stalls forgiven", "rt.p99_attainment"),
            _share("stalled", "rt.stalled", Better.LOWER),
            _share("tokens in time", "rt.tokens_in_time"),
            _times("TTFT", "rt.ttft_s", Unit.MILLISECONDS),
            _times("TBT", "rt.tbt_s", Unit.MILLISECONDS),
            _times("mean TPOT", "rt.mean_tpot_s", Unit.MILLISECONDS),
            _times("end to end", "rt.end_to_end_s", Unit.SECONDS),
        ),
    ),
    Section(
        "Best-effort (BE)",
        (
            _rate("BE tokens", "be.tokens_per_s"),
            _rate("BE requests", "be.requests_per_s"),
            _share("JCT attainment", "be.jct_attainment"),
            _times("JCT", "be.jct_s", Unit.SECONDS),
        ),
    ),
    Section(
        "Steps and copies",
        (
            _count("steps", "steps.count"),
            _count("prefill steps", "steps.prefill"),
            _count("decode steps", "steps.decode"),
            _count("mixed steps", "steps.mixed"),
            _times("step time", "steps.seconds", Unit.MILLISECONDS, Better.NEITHER),
            _times("step tokens", "steps.tokens", Unit.NUMBER, Better.NEITHER),
            _count("prefix spread, mean", "steps.spread.mean", Better.LOWER),
            _count("prefix spread, p90", "steps.spread.p90", Better.LOWER),
            _share("bubble", "steps.spread.bubble_share", Better.LOWER),
            _share("prediction error, p50", "steps.prediction.all.p50", Better.LOWER),
            _share("prediction error, p90", "steps.prediction.all.p90", Better.LOWER),
            _share("prompts computed", "prompts_computed", Better.LOWER),
            _share("workers busy", "mean_step_share", Better.NEITHER),
            _count("copies", "copies.count", Better.LOWER),
            _count("copied tokens", "copies.tokens", Better.LOWER),
            _time("copying", "copies.seconds"),
        ),
    ),
    Section(
        "The KV pool",
        (
            FigureRow("pages of RT", "pool.rt", Unit.SHARE),
            FigureRow("pages of BE", "pool.be", Unit.SHARE),
            FigureRow("pages of both", "pool.shared", Unit.SHARE),
            FigureRow("idle pages", "pool.idle", Unit.SHARE),
            FigureRow("leased pages", "pool.leased", Unit.SHARE),
        ),
    ),
    Section(
        "As the papers count",
        (
            _rate("AlignedServe decode tokens", "papers.alignedserve.decode_tokens_per_s"),
            _time("AlignedServe P99 TPOT", "papers.alignedserve.p99_tpot_s", Unit.MILLISECONDS),
            _share("BROS TTFT ≤ 0.4 s", "papers.bros.ttft_attainment"),
            _share("BROS TPOT ≤ 0.2 s", "papers.bros.tpot_attainment"),
            _share("BROS both", "papers.bros.attainment"),
            _time("BROS normalised latency", "papers.bros.normalised_latency_s", Unit.MILLISECONDS),
            _rate("BROS BE requests", "papers.bros.be_requests_per_s"),
            _time("ALISE normalised latency", "papers.alise.normalised_latency_s", Unit.MILLISECONDS),
            _share("AccelGen steps in SLO", "papers.accelgen.steps_in_slo"),
            _share("AccelGen JCT attainment", "papers.accelgen.jct_attainment"),
            _rate("AccelGen goodput", "papers.accelgen.goodput"),
            _share("AccelGen forward size ÷ budget", "papers.accelgen.budget_used"),
            _share("AccelGen allocated ÷ total KV", "papers.accelgen.kv_allocated"),
            _share("Apt-Serve attainment", "papers.apt_serve.attainment"),
            _rate("Apt-Serve attained requests", "papers.apt_serve.attained_per_s"),
        ),
    ),
    Section(
        "The simulator",
        (
            _time("wall time", "speed.wall_s", better=Better.NEITHER),
            FigureRow("simulated seconds per wall second", "speed.simulated_s_per_wall_s", Unit.NUMBER),
            FigureRow("steps per wall second", "speed.steps_per_wall_s", Unit.PER_SECOND),
        ),
    ),
)

ROWS = tuple(row for section in SECTIONS for row in section.rows)
NUMBERS = tuple(number for row in ROWS for number in row.numbers(_PARTS))
COMPARED = tuple(number for row in ROWS if row.better is not Better.NEITHER for number in row.numbers(row.compared))
