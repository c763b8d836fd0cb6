"""Measure whether the job runner opens as many lines as a deployment can use, simulated.

    python -m benchmarks.job_window [--clusters colocated,4xcolocated,2+2]

A single job has the deployment for itself. Its lines per second, with the job runner's own core, are compared with the
rate of the same deployment when the largest number of requests that a runner may open is always open. Lines have
prompts of 64-128 tokens and one output token, as in classification, or prompts of 512-1,024 and outputs of 32-128. The
workers are the simulator's default, with a GPU each.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from alignedserve.simulator.batch_jobs import JobsSimulation, Submission
from alignedserve.simulator.reports.request_figures import has_finished
from alignedserve.simulator.reports.trial import SimulationTrial
from alignedserve.simulator.trials.building import settings_of
from benchmarks.common.simulating import record_of, recorded, save_load
from benchmarks.report import command, report, several, status

MOST_OPEN = 256  # default of --jobs-most-open
LINES = 1_500
GOAL = 0.9  # share of the possible rate
KINDS = {"one token": ((64, 128), (1, 1)), "documents": ((512, 1_024), (32, 128))}
_FULL_S = 20.0

Sizes = tuple[int, int]


def by_the_runner(folder: Path, cluster: str, prompt: Sizes, output: Sizes) -> float:
    """Return the lines per second with the job runner's own core."""
    few = {"name": "chat", "kind": "sizes", "prompt": "32", "output": "1", "max_tokens": 1, "rate": 0.01}
    trial = SimulationTrial("aligned", save_load(folder / "load.yaml", 1.0, few), cluster=cluster)
    simulation = JobsSimulation(settings_of(trial), [Submission("job", LINES, 3_600, prompt, output)])
    recorded(simulation)
    progress = simulation.progress["job"]
    assert progress.ended_at is not None
    return LINES / (progress.ended_at - progress.job.created_at)


def at_most(folder: Path, cluster: str, prompt: Sizes, output: Sizes) -> float:
    """Return the lines per second when as many requests are open as a runner may open."""
    sizes = {"prompt": f"{prompt[0]}-{prompt[1]}", "output": f"{output[0]}-{output[1]}", "max_tokens": output[1]}
    closed = {"name": "lines", "kind": "sizes", "service": "be", "jct_s": 3_600, "arrivals": "closed"}
    stream = {**closed, **sizes, "in_flight": MOST_OPEN}
    load = save_load(folder / "load.yaml", _FULL_S, stream)
    record = record_of(SimulationTrial("aligned", load, cluster=cluster))
    return sum(map(has_finished, record.requests)) / record.duration_s


def main() -> None:
    parser = command(__doc__)
    clusters = ["colocated", "4xcolocated", "2+2"]
    parser.add_argument("--clusters", type=several(str), default=clusters, help="default: %(default)s")
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        for cluster in args.clusters:
            for name, (prompt, output) in KINDS.items():
                most = at_most(Path(folder), cluster, prompt, output)
                found = by_the_runner(Path(folder), cluster, prompt, output)
                label = f"{cluster}, {name}"
                report(label, found, "lines/s", baseline=most, goal=GOAL * most, at_least=True)
    sys.exit(status())


if __name__ == "__main__":
    main()
