"""List the figures that tables show: their order, label, unit, and which direction is better."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from alignedserve.lab.loads.figures.tables import Unit
from alignedserve.lab.reports.figures import RunFigures


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
    about: str  # what the figure means, for docs/how/simulate.md
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


_UNITS = {
    "number": Unit.NUMBER, "share": Unit.SHARE, "rate": Unit.PER_SECOND, "s": Unit.SECONDS, "ms": Unit.MILLISECONDS
}  # fmt: skip
# label | path | unit, `each` where it is a distribution, and whether `more` or `less` is better | what it means
_TABLE = """
Requests
    all | requests.count | number | requests that arrived
    finished | requests.finished | number | requests that got their whole output
    refused | requests.refused | number less | requests that were turned away
    left | requests.left | number | requests whose client had no patience
    broken | requests.broken | number | requests whose gateway died
    unfinished | requests.unfinished | number less | requests that nothing had ended when the run ended
    preemptions | requests.preemptions | number less | how often a request gave up its memory after its first token and
        was computed again
    duration | duration_s | s | from the first arrival to the last end
    tokens | tokens_per_s | rate more | output tokens that reached clients, in a second
Real-time (RT)
    attainment | rt.attainment | share more | share of requests whose first token came within `ttft`, whose own P99 gap
        is within `tbt`, and that never stalled
    TTFT in time | rt.ttft_attainment | share more | share that keeps the first of these
    P99 TBT in time | rt.tbt_attainment | share more | share that keeps the second; a request of one token has no gap to
        break
    both, stalls forgiven | rt.p99_attainment | share more | attainment without the last: the P99 of a request's gaps
        forgives one gap in a hundred of any length
    stalled | rt.stalled | share less | share of requests with a gap that is longer than five times `tbt` and longer
        than a second
    tokens in time | rt.tokens_in_time | share more | share of single tokens in time; a request that did not finish
        counts one late token
    TTFT | rt.ttft_s | ms each less | arrival to first token, of requests that got one
    TBT | rt.tbt_s | ms each less | gaps between tokens, of all requests together
    mean TPOT | rt.mean_tpot_s | ms each less | of requests with two tokens or more: first to last token ÷ gaps
    end to end | rt.end_to_end_s | s each less | arrival to end, of finished requests
Best-effort (BE)
    BE tokens | be.tokens_per_s | rate more | output tokens of finished requests in a second
    BE requests | be.requests_per_s | rate more | finished requests in a second
    JCT attainment | be.jct_attainment | share more | share that finished within its completion window
    JCT | be.jct_s | s each less | arrival to end, of finished requests
Steps and copies
    steps | steps.count | number | forward passes of all workers; what a worker's death cut short is not counted
    prefill steps | steps.prefill | number | steps of prompts alone
    decode steps | steps.decode | number | steps of decodes alone
    mixed steps | steps.mixed | number | steps of both
    step time | steps.seconds | ms each | seconds of a step, by the simulator's truth
    step tokens | steps.tokens | number each | tokens that a step runs
    prefix spread, mean | steps.spread.mean | number less | longest less shortest prefix among the decodes of a step
    prefix spread, p90 | steps.spread.p90 | number less | the same, 90th percentile
    bubble | steps.spread.bubble_share | share less | Σ(B·max C - ΣC) ÷ Σ(B·max C), over steps with B decodes of
        prefixes C
    prediction error, p50 | steps.prediction.all.p50 | share less | |predicted ÷ true - 1|, median over steps
    prediction error, p90 | steps.prediction.all.p90 | share less | the same, 90th percentile
    prompts computed | prompts_computed | share less | prompt tokens of all steps ÷ those of requests that got a token:
        less with a prefix cache, more where prompts are computed again
    workers busy | mean_step_share | share | share of the run that a worker spends in steps, mean over workers
    copies | copies.count | number less | of KV between devices and the pool, both ways
    copied tokens | copies.tokens | number less | their tokens
    copying | copies.seconds | s less | their seconds, added up
The KV pool
    pages of RT | pool.rt | share | share of pages that real-time requests alone hold
    pages of BE | pool.be | share | that best-effort requests alone hold
    pages of both | pool.shared | share | that requests of both classes hold, whose prompts begin alike
    idle pages | pool.idle | share | that are kept for prompts that begin as they do
    leased pages | pool.leased | share | that workers have, for prompts that are about to be stored
As the papers count
    AlignedServe decode tokens | papers.alignedserve.decode_tokens_per_s | rate more | decodes of all steps in a second
    AlignedServe P99 TPOT | papers.alignedserve.p99_tpot_s | ms less | 99th percentile of the seconds of steps with
        decodes, each step counted once
    BROS TTFT ≤ 0.4 s | papers.bros.ttft_attainment | share more | share of RT requests
    BROS TPOT ≤ 0.2 s | papers.bros.tpot_attainment | share more | share of RT requests, by their mean TPOT
    BROS both | papers.bros.attainment | share more | share of RT requests that keep both
    BROS normalised latency | papers.bros.normalised_latency_s | ms less | mean of end to end ÷ output tokens, of
        finished RT requests
    BROS BE requests | papers.bros.be_requests_per_s | rate more | finished BE requests in a second
    ALISE normalised latency | papers.alise.normalised_latency_s | ms less | the same mean, of all finished requests
    AccelGen steps in SLO | papers.accelgen.steps_in_slo | share more | of the steps that made an RT token which reached
        its client, the share that made no late token. The n-th step that made a token for a request made its n-th
        token: exact while no worker dies
    AccelGen JCT attainment | papers.accelgen.jct_attainment | share more | share of all requests that finished within
        their own completion window
    AccelGen goodput | papers.accelgen.goodput | rate more | requests in a second that keep every promise of their class
        (RT: `ttft`, P99 `tbt`, `jct`; BE: `jct`)
    AccelGen forward size ÷ budget | papers.accelgen.budget_used | share more | tokens of a step ÷ most tokens its
        worker may run, mean over steps
    AccelGen allocated ÷ total KV | papers.accelgen.kv_allocated | share more | share of blocks that requests have
        when a step begins; mean over the seconds of steps
    Apt-Serve attainment | papers.apt_serve.attainment | share more | both in time, stalls forgiven
    Apt-Serve attained requests | papers.apt_serve.attained_per_s | rate more | such requests in a second
The simulator
    wall time | speed.wall_s | s | seconds that the run took to simulate
    simulated seconds per wall second | speed.simulated_s_per_wall_s | number | the run's duration ÷ wall time
    steps per wall second | speed.steps_per_wall_s | rate | steps ÷ wall time
"""


def _read(table: str) -> Iterator[tuple[str, tuple[FigureRow, ...]]]:
    """Yield the title and the rows of each section; a row goes on in lines that are indented further."""
    for title, lines in re.findall(r"^(\S.*)\n((?: .*\n)+)", table, re.MULTILINE):
        rows = re.split(r"\n    (?! )", f"\n{lines.rstrip()}")[1:]
        yield title, tuple(_row(*" ".join(row.split()).split(" | ", 3)) for row in rows)


def _row(label: str, path: str, kind: str, about: str) -> FigureRow:
    unit, *words = kind.split()
    better = Better.HIGHER if "more" in words else Better.LOWER if "less" in words else Better.NEITHER
    is_each = "each" in words
    return FigureRow(label, path, _UNITS[unit], about, better, ("p50", "p99") if is_each else (), is_each)


SECTIONS = dict(_read(_TABLE))
ROWS = tuple(row for rows in SECTIONS.values() for row in rows)
NUMBERS = tuple(number for row in ROWS for number in row.numbers(_PARTS))
COMPARED = tuple(number for row in ROWS if row.better is not Better.NEITHER for number in row.numbers(row.compared))
