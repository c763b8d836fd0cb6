"""The settings by which a scheduler was said before it had a name: order, packing, selection and as_in_paper.

They change one property of the scheduler that `schedule.scheduler` names. For example, preset bros has scheduler
`bros`, which goes by slack; with `--set schedule.order=due` it is `aligned`, which is the same by due.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

from alignedserve.errors import ConfigError
from alignedserve.scheduling.orders import Order
from alignedserve.scheduling.policy import SchedulerName


class Packing(str, Enum):
    """The rule for which seated requests a decode worker runs in a step, and which it preempts when memory is short."""

    FCFS = "fcfs"
    LONGEST = "longest"
    ROUND_ROBIN = "round_robin"
    MLFQ = "mlfq"
    SKIP_JOIN = "skip_join"
    KNAPSACK = "knapsack"
    RT_BE = "rt_be"


class PromptChoice(str, Enum):
    """The rule for which prompts fill a step, among those that are not urgent."""

    IN_ORDER = "in_order"
    MULTI_RESOURCE = "multi_resource"


class Properties(NamedTuple):
    """What is said of a scheduler, in place of its name."""

    order: Order
    packing: Packing
    selection: PromptChoice = PromptChoice.IN_ORDER
    as_in_paper: bool = False


_BEST = PromptChoice.MULTI_RESOURCE
PROPERTIES: Mapping[SchedulerName, Properties] = {
    SchedulerName.ALIGNED: Properties(Order.DUE, Packing.RT_BE),
    SchedulerName.BEST_FIT: Properties(Order.DUE, Packing.RT_BE, _BEST),
    SchedulerName.BROS: Properties(Order.SLACK, Packing.RT_BE),
    SchedulerName.SHORTEST: Properties(Order.SHORTEST_REMAINING, Packing.RT_BE),
    SchedulerName.ALISE: Properties(Order.LEVELS, Packing.RT_BE),
    SchedulerName.ACCELGEN: Properties(Order.SLACK, Packing.RT_BE, _BEST, True),
    SchedulerName.ACCELGEN_NO_BATCH: Properties(Order.SLACK, Packing.RT_BE, as_in_paper=True),
    SchedulerName.ACCELGEN_NO_ORDER: Properties(Order.FCFS, Packing.FCFS, _BEST, True),
    SchedulerName.FCFS: Properties(Order.FCFS, Packing.FCFS),
    SchedulerName.LONGEST: Properties(Order.FCFS, Packing.LONGEST),
    SchedulerName.ROUND_ROBIN: Properties(Order.FCFS, Packing.ROUND_ROBIN),
    SchedulerName.MLFQ: Properties(Order.FCFS, Packing.MLFQ),
    SchedulerName.FASTSERVE: Properties(Order.FCFS, Packing.SKIP_JOIN),
    SchedulerName.APT_SERVE: Properties(Order.FCFS, Packing.KNAPSACK),
    SchedulerName.TGI: Properties(Order.FCFS, Packing.FCFS),
}


def scheduler_like(name: SchedulerName, said: Mapping[str, Any]) -> SchedulerName:
    """Return the scheduler that is like this one but for what is said. Raises ConfigError where there is none."""
    changed = {key: value for key, value in said.items() if value is not None}
    wanted = PROPERTIES[name]._replace(**changed)
    if wanted == PROPERTIES[name]:
        return name
    found = named(wanted)
    if found is None:
        shown = ", ".join(f"{key} {getattr(value, 'value', value)}" for key, value in wanted._asdict().items())
        raise ConfigError(f"schedule: there is no scheduler with {shown}: choose one by schedule.scheduler")
    return found


def named(wanted: Properties) -> SchedulerName | None:
    """Return the scheduler with these properties, if there is one."""
    return next((name for name, properties in PROPERTIES.items() if properties == wanted), None)
