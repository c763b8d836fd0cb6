"""The metrics of a small deployment, with a series for each of them."""

from __future__ import annotations

from alignedserve.config.choices import MetricsPrefix
from alignedserve.config.prices import Prices
from alignedserve.core import Fallback, FinishReason, PreemptionCause, Rejection, ServiceClass, Spent, Usage
from alignedserve.jobs.metrics import JobCollector
from alignedserve.jobs.state import JobFigures, LineFate
from alignedserve.metrics.parts import PartMetrics
from alignedserve.metrics.requests import ALL, RequestMetrics
from alignedserve.metrics.series import merge
from alignedserve.protocol.figures import (
    DecodeSteps,
    EnergyFigures,
    Garbage,
    GpuFigures,
    MachineFigures,
    Preempted,
    ProcessFigures,
    Stages,
    WorkerLoad,
)
from alignedserve.protocol.messages import Figures
from alignedserve.store.job import JobStatus

FELL_BACK = (Fallback("x", "y", "z"),)
MACHINE = MachineFigures(1.0, 1, 1, 1, (GpuFigures(1.0, 1, 1),))
ENERGY = EnergyFigures(2.0, 1.0, "nvml")


def exposed(prefix: MetricsPrefix = MetricsPrefix.ALIGNEDSERVE) -> str:
    """Return a deployment's metrics, with a series for each of them."""
    requests = RequestMetrics("demo", prefix, prices=Prices(second=1.0))
    for service in ServiceClass:
        requests.succeeded.of(FinishReason.STOP.value, service.value).inc()
        requests.count_use(service, "acme", Spent(1.0, 1.0))
        requests.rejected.of(Rejection.LATE.value, service.value).inc()
        requests.window.count(service, ALL, "default", is_kept=True)
    requests.http_errors.of("503").inc()
    jobs = {JobStatus.IN_PROGRESS: 1}
    figures = JobFigures(jobs, jobs, 1, 1, {LineFate.COMPLETED: 1}, 0, 60.0)
    JobCollector(requests.series, lambda: figures)
    parts = PartMetrics("demo", prefix)
    preempted = (Preempted(PreemptionCause.MEMORY, ServiceClass.BE, keeps_kv=False, number=1),)
    load, process = (
        WorkerLoad(slack_s=1.0, preempted=preempted),
        ProcessFigures(1.0, 1, 1, 1.0, "3.12.3", (Garbage(1, 1, 1),), FELL_BACK, machine=MACHINE, energy=ENERGY),
    )
    parts.update(Figures(steps=DecodeSteps(), worker=load, process=process, member="decode-0"))
    parts.update(Figures(Usage(), member="pool-0"))
    parts.update(Figures(rebuilt_s=1.0, rt=Stages(), be=Stages(), member="router"))
    return merge([*requests.blocks(), *parts.blocks()])
