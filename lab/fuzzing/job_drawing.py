"""Draw batch jobs and faults of their runner, in every fourth run, from generators of their own."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from alignedserve.core import ServiceClass
from alignedserve.lab.fuzzing.scenario import Ask, JobAsk, Scenario
from alignedserve.simulator.machines.fault_drawing import draw_job_faults
from alignedserve.simulator.machines.faults import JOBS

_DAY_S = 86_400
_AFTER_S = 4.0  # after the last submission, in which faults still happen


def some_with_jobs(drawn: Scenario) -> Scenario:
    draw = Random(f"{drawn.seed}/jobs")
    if draw.random() > 1 / 4:
        return drawn
    jobs = tuple(_draw_job(draw, number, drawn) for number in range(draw.randint(1, 3)))
    drawn = replace(drawn, jobs=jobs, most_open_lines=draw.choice((1, 3, 256)))
    if not drawn.faults:
        return drawn
    at = [job.at for job in jobs]
    faults = (*drawn.faults, *draw_job_faults(drawn.seed, drawn.members, min(at), max(at) + _AFTER_S))
    return replace(drawn, faults=tuple(sorted(faults, key=lambda fault: fault.at)))


def _draw_job(draw: Random, number: int, drawn: Scenario) -> JobAsk:
    """Draw a job; no line needs more memory than the largest request."""
    at, most = draw.uniform(0.5, drawn.asks[-1].at), max(ask.most_tokens for ask in drawn.asks)
    return JobAsk(
        number=number,
        at=at,
        lines=tuple(_draw_line(draw, 1000 * (number + 1) + line, at, most) for line in range(draw.randint(1, 12))),
        window_s=draw.choice((_DAY_S, _DAY_S, _DAY_S, draw.randint(1, 8))),
        cancel_after_s=draw.expovariate(1 / 1.5) if draw.random() < 1 / 3 else None,
    )


def _draw_line(draw: Random, number: int, at: float, most_tokens: int) -> Ask:
    num_prompt = draw.randint(1, max(1, most_tokens // 2))
    max_tokens = draw.randint(1, max(1, most_tokens - num_prompt))
    length = draw.randint(1, 2 * max_tokens)
    return Ask(number, at, JOBS, num_prompt, length, max_tokens, ServiceClass.BE)
