"""Schedulers that are found by name: those of the papers, and of packages."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest

from alignedserve.config.config import of_preset
from alignedserve.errors import ConfigError
from alignedserve.schedulers.table import scheduler_of
from alignedserve.scheduling import offered
from alignedserve.scheduling.orders import BY_DUE
from alignedserve.scheduling.policy import Policy, SchedulerRules, rules_of
from alignedserve.worker.scheduler import Scheduler
from alignedserve.worker.step.view import PlannedStep, StepView

GROUP = "alignedserve.schedulers"


class Mine(Scheduler):
    rules = SchedulerRules(BY_DUE, is_rt_first=True)

    def plan(self, view: StepView) -> PlannedStep:
        return self.step_of(view, view.decodes)


@pytest.fixture(autouse=True)
def fresh() -> None:
    offered.offered.cache_clear()


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    points = EntryPoints([EntryPoint("mine", f"{__name__}:Mine", GROUP), EntryPoint("gone", "nowhere:Mine", GROUP)])
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: points)


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("name", ["mine", f"{__name__}:Mine"])
def test_a_package_offers_a_scheduler_by_name(name: str) -> None:
    policy = of_preset("aligned", {"schedule.scheduler": name}).policy
    assert type(scheduler_of(policy, 8)) is Mine
    assert (policy.ordering, policy.is_rt_first) == (BY_DUE, True)


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("theirs", "'theirs' is not known: choose aligned, best_fit, "),
        ("theirs", "and gone, mine of installed packages"),
        ("gone", "'gone' cannot be imported: ModuleNotFoundError"),
        (f"{__name__}:GROUP", "is no scheduler: write a subclass of Scheduler"),
    ],
)
def test_a_name_that_means_no_scheduler_is_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        of_preset("aligned", {"schedule.scheduler": name})
    assert said in str(refused.value)


def test_without_the_papers_ours_serves_and_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = lambda _part: None  # noqa: E731
    for home in ("schedulers.table", "scheduling.offered"):
        monkeypatch.setattr(f"alignedserve.{home}.of_papers", nothing)
    assert type(scheduler_of(Policy(), 8)).__name__ == "Aligned"
    with pytest.raises(ConfigError, match="'fcfs' is not known: choose aligned, or offer it"):
        assert rules_of("fcfs")
