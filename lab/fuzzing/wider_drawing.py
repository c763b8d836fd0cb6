"""Widen drawn scenarios: presets, switches, many workers, several nodes and clocks apart, each in some of the runs.

Each feature draws from a generator of its own, as in scenario_drawing.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

from alignedserve.config.config import of_preset
from alignedserve.config.presets import presets
from alignedserve.core import AttentionPattern, Fold, ServiceClass, units_for
from alignedserve.lab.fuzzing.scenario import TOPOLOGIES, Ask, AskedVector, Scenario, least_pages
from alignedserve.lab.simulator.machines.faults import Skew
from alignedserve.papers.names import SchedulerName
from alignedserve.papers.policy import PaperPolicy
from alignedserve.papers.rules import WEIGHED
from alignedserve.scheduling.form_rules import PLAIN
from alignedserve.scheduling.policy import Chunking, Lends, Policy, Room

_MAKE_PAUSES = SchedulerName.ALIGNED, SchedulerName.BEST_FIT
_MOST_WORKERS, _MOST_NODES = 4, 3
_AHEAD_S, _APART_S = 4 * 3600.0, 3 * 3600.0
_BY_ARRIVAL = (
    *(SchedulerName.VLLM_V0, SchedulerName.VLLM_V1, SchedulerName.ORCA),
    *(SchedulerName.SARATHI, SchedulerName.FASTGEN, SchedulerName.DISTSERVE),
)


def widened(drawn: Scenario) -> Scenario:
    drawn = _with_choices(_with_families(_on_nodes(_with_more_workers(_lending(_switched(_with_preset(drawn)))))))
    return _ahead_of_promises(_as_others(_with_callers(_with_copies_beside(_with_known_copies(drawn)))))


def _as_others(drawn: Scenario) -> Scenario:
    """Give half of the runs by arrival the scheduler of another system, as a rule with other settings than its
    preset's."""
    draw = Random(f"{drawn.seed}/names")
    if drawn.policy.scheduler != SchedulerName.FCFS or draw.random() > 1 / 2:
        return drawn
    return replace(drawn, policy=replace(drawn.policy, scheduler=draw.choice(_BY_ARRIVAL)))


def _ahead_of_promises(drawn: Scenario) -> Scenario:
    """Plan every twelfth run for a part of the times that chats are promised."""
    draw = Random(f"{drawn.seed}/before time")
    if draw.random() > 1 / 12:
        return drawn
    return replace(drawn, policy=replace(drawn.policy, slo_scale=draw.choice((0.05, 0.5, 0.8))))


def _with_callers(drawn: Scenario) -> Scenario:
    """Let several callers share every third run, one with most of the requests; turns keep the caller."""
    if Random(f"{drawn.seed}/callers").random() > 1 / 3:
        return drawn
    callers = ["ann"] * 6 + ["bob", "cat"]

    def with_caller(ask: Ask) -> Ask:
        if ask.after is not None:
            before = with_caller(ask.after)
            return replace(ask, after=before, caller=before.caller)
        return replace(ask, caller=Random(f"{drawn.seed}/caller of {ask.number}").choice(callers))

    return replace(drawn, asks=tuple(map(with_caller, drawn.asks)))


def some_without_faults(drawn: Scenario) -> Scenario:
    """Leave all faults out of every eighth run: there nothing may be late, and no attempt may be lost (waste.py)."""
    is_calm = Random(f"{drawn.seed}/calm").random() < 1 / 8
    return replace(drawn, faults=()) if is_calm else drawn


def some_with_clocks_apart(drawn: Scenario) -> Scenario:
    """Let the clocks of two members be off by up to three hours in every eighth run, one from its next life on.

    All clocks are ahead by four hours, since no clock shows less than nothing.
    """
    draw = Random(f"{drawn.seed}/clocks")
    if draw.random() > 1 / 8 or not drawn.faults:
        return drawn
    skews = [Skew(0.0, member, _AHEAD_S) for member in drawn.members]
    for at in (0.0, drawn.faults[0].at):
        skews.append(Skew(at, draw.choice(drawn.members), _AHEAD_S + draw.uniform(-_APART_S, _APART_S)))
    others = (fault for fault in drawn.faults if not isinstance(fault, Skew))
    return replace(drawn, faults=tuple(sorted((*skews, *others), key=lambda fault: fault.at)))


def some_with_pauses(drawn: Scenario) -> Scenario:
    """Let workers' steps, which take long then, pause between layers in most runs with a policy that allows it."""
    draw, policy = Random(f"{drawn.seed}/amid"), drawn.policy
    makes_pauses = policy.scheduler in _MAKE_PAUSES and policy.chunking is Chunking.SLO
    if not makes_pauses or policy.memory != PLAIN or draw.random() > 2 / 3:
        return drawn
    costs = replace(drawn.costs, token_s=10 ** draw.uniform(-4, -2))
    return replace(drawn, costs=costs, layers=draw.choice((3, 8, 24)))


def some_with_late_ends(drawn: Scenario) -> Scenario:
    """Let receivers hear of the ends of transfers after their senders in every fourth run with transfers: what the
    sender then says may come before the end is known."""
    draw = Random(f"{drawn.seed}/late ends")
    if draw.random() > 1 / 4 or not drawn.direct:
        return drawn
    return replace(drawn, network=replace(drawn.network, late_end_s=10 ** draw.uniform(-4, -1.5)))


def some_with_windows(drawn: Scenario) -> Scenario:
    """Give all layers of the model a window in every fifth run, if by its policy requests drop what no layer reads.

    Half of these devices have room for hardly more than the request that holds most.
    """
    draw, limits = Random(f"{drawn.seed}/reach"), drawn.limits
    if draw.random() > 1 / 5 or not drawn.policy.drops:
        return drawn
    limits = replace(limits, reach=draw.choice((1, 2, 7, 20, 20, 60, 100)))
    if draw.random() < 0.5:
        held = max(limits.least_held(ask.most_tokens) for ask in drawn.asks)
        limits = replace(limits, num_blocks=units_for(held, limits.block_size) + draw.choice((0, 2, 8)))
    return replace(drawn, limits=limits)


def some_with_folds(drawn: Scenario) -> Scenario:
    """Give some layers of the model a window, or stretches, in every fourth run of the others where requests may give
    memory back."""
    draw, limits = Random(f"{drawn.seed}/pairs in one"), drawn.limits
    if draw.random() > 1 / 4 or limits.reach is not None or not drawn.policy.drops:
        return drawn
    size, blocks = draw.choice((1, 2, 7, 20, 20, 60)), draw.choice((2, 3, 6))
    sight = AttentionPattern(window=size) if draw.random() < 2 / 3 else AttentionPattern(stretch=size)
    return replace(drawn, limits=replace(limits, fold=Fold(sight, blocks)))


def some_with_vectors(drawn: Scenario) -> Scenario:
    """Let some requests of every sixth run, or all, ask for vectors in place of outputs."""
    draw = Random(f"{drawn.seed}/vector")
    if draw.random() > 1 / 6 or drawn.limits.reach is not None:  # a device may have no room for all of a prompt
        return drawn
    share, kinds = draw.choice((0.3, 1.0)), draw.choice(([*AskedVector], [AskedVector.WHOLE]))
    asks = (
        replace(ask, length=1, max_tokens=1, vector=draw.choice(kinds)) if draw.random() < share else ask
        for ask in drawn.asks
    )
    return replace(drawn, asks=tuple(asks))


_LATER = "alignedserve"  # it came after seeds that are kept: they draw what they drew


def _with_preset(drawn: Scenario) -> Scenario:
    """Give every fifth run the policy of a preset; what a preset reserves is cut to the size of the device."""
    draw = Random(f"{drawn.seed}/preset")
    if draw.random() > 1 / 5:
        return drawn
    policy = _policies()[draw.choice([name for name in presets() if name != _LATER])]
    reserve = min(policy.reserve, draw.choice((1, drawn.limits.num_tokens // 2, drawn.limits.num_tokens)))
    return _with_policy(drawn, replace(policy, reserve=reserve))


@cache
def _policies() -> dict[str, PaperPolicy]:
    chunk = Policy().expected_chunk  # those of the presets are for large steps
    return {name: replace(PaperPolicy.of(of_preset(name, {}).policy), expected_chunk=chunk) for name in presets()}


def _switched(drawn: Scenario) -> Scenario:
    """Change one to three switches in every third run, where they mean something together."""
    draw = Random(f"{drawn.seed}/switches")
    if draw.random() > 1 / 3:
        return drawn
    policy, tokens = drawn.policy, drawn.limits.num_tokens
    changes: tuple[dict[str, Any], ...] = (
        {"pinning": False},
        {"evict": False},
        {"prefetch": False},
        {"helps": not policy.helps},
        {"refuse_ttfts": draw.choice((0.0, 0.01, 0.3))},
        {"room": Room.WHOLE, "reserve": draw.choice((0, 1, tokens // 2, tokens))},
        {"chunking": Chunking.NONE, "waiting_ratio": draw.choice((0.5, 1.2)), "scheduler": SchedulerName.TGI},
        {"scheduler": SchedulerName.LONGEST},
        {"scheduler": SchedulerName.FASTSERVE},
        {"age_s": draw.choice((0.05, 1.0))},
        {"expected_output": draw.choice((1, 16, 4096))},
    )
    for change in draw.choices(changes, k=draw.randint(1, 3)):
        changed = replace(policy, **change)
        policy = changed if _may_become(policy, changed.scheduler) and changed.problem is None else policy
    return _with_policy(drawn, policy)


def _may_become(policy: Policy, scheduler: str) -> bool:
    """Return whether the switch of a scheduler is a small one."""
    if scheduler == SchedulerName.TGI:
        return policy.scheduler == SchedulerName.FCFS
    return scheduler == policy.scheduler or policy.ordering.is_by_arrival


def _lending(drawn: Scenario) -> Scenario:
    """Let prefill workers decode nothing in every eighth run."""
    never = Random(f"{drawn.seed}/lends").random() < 1 / 8
    return replace(drawn, policy=replace(drawn.policy, lends=Lends.NEVER)) if never else drawn


def _with_policy(drawn: Scenario, policy: PaperPolicy) -> Scenario:
    """Return the scenario with another policy, and a cost of hidden vectors if any."""
    draw, costs = Random(f"{drawn.seed}/hidden vectors"), drawn.costs
    if policy.block_use.keeps_hidden and not costs.hidden_token_s:
        costs = replace(costs, hidden_token_s=10 ** draw.uniform(-7, -4))
    if not policy.block_use.keeps_hidden:
        costs = replace(costs, hidden_token_s=0.0)
    return replace(drawn, policy=policy, costs=costs)


def _with_more_workers(drawn: Scenario) -> Scenario:
    """Draw up to four workers of each kind in every fifth run, or several colocated ones."""
    draw = Random(f"{drawn.seed}/workers")
    if draw.random() > 1 / 5:
        return drawn
    prefill, decode = draw.randint(0, _MOST_WORKERS), draw.randint(1, _MOST_WORKERS)
    topology = f"{prefill}+{decode}" if prefill else f"{max(2, decode)}xcolocated"
    return replace(drawn, topology=topology)


def _with_families(drawn: Scenario) -> Scenario:
    """Let the requests of every fifth run come together and begin alike: they share pages of a device while one runs,
    and some requests leave that others wait for."""
    draw = Random(f"{drawn.seed}/families")
    if draw.random() > 1 / 5:
        return drawn
    at, asks = 0.0, list[Ask]()
    for ask in drawn.asks:
        at = ask.at if draw.random() < 0.3 else max(at, drawn.asks[0].at)
        service, leaves_after_s = draw.choice((ask.service, ServiceClass.BE)), draw.choice((None, draw.uniform(0, 0.1)))
        num_alike = max(0, ask.num_prompt - draw.choice((0, 0, 1, 5)))
        family = replace(ask, at=at, service=service, beginning=0, num_alike=num_alike)
        asks.append(family if draw.random() < 0.7 else replace(family, leaves_after_s=leaves_after_s))
    return _sharing(replace(drawn, asks=tuple(asks)))


def _with_choices(drawn: Scenario) -> Scenario:
    """Let clients of every eighth run ask for several choices of a prompt, most at once: while a step runs, all choices
    of the next come to wait. Some leave early."""
    draw = Random(f"{drawn.seed}/choices")
    if draw.random() > 1 / 8:
        return drawn
    asks, at = list[Ask](), drawn.asks[0].at
    for ask in drawn.asks[: draw.randint(1, 5)]:
        at = draw.choice((at, at, at + draw.uniform(0, 0.1)))
        prompt = {"after": None, "num_prompt": draw.randint(5, 60), "beginning": ask.number, "num_alike": 60}
        for choice in range(draw.randint(2, 5)):
            leaves_after_s = draw.choice((None, ask.leaves_after_s, draw.uniform(0, 0.2)))
            # A number of the same kind of sampling (scenario.py): choices differ in the seed alone.
            asks.append(
                replace(ask, number=ask.number + 3_000 * choice, **prompt, at=at, leaves_after_s=leaves_after_s)
            )
    size, max_batch = drawn.limits.block_size, draw.randint(3, 20)
    num_blocks = int(units_for(max(ask.most_tokens for ask in asks), size) * draw.choice((1.5, 3.0, 8.0)))
    limits = replace(drawn.limits, num_blocks=num_blocks, max_batch=max_batch, max_step_tokens=max_batch + 64)
    num_pages = least_pages(tuple(asks), limits) * draw.choice((1, 4))
    topology = draw.choice((drawn.topology, TOPOLOGIES[0]))
    return _sharing(replace(drawn, topology=topology, asks=tuple(asks), limits=limits, num_pages=num_pages))


def _sharing(drawn: Scenario) -> Scenario:
    """Let requests share blocks, if the policy can."""
    as_kv = WEIGHED if drawn.policy.scheduler == SchedulerName.APT_SERVE else PLAIN
    policy = replace(drawn.policy, reuse=True, memory=as_kv)
    return drawn if policy.problem is not None else _with_policy(drawn, policy)


def _with_known_copies(drawn: Scenario) -> Scenario:
    """Let the workers of every third run know how long copies take: they compute what takes less time than its copy."""
    return replace(drawn, knows_copies=Random(f"{drawn.seed}/copies").random() < 1 / 3)


def _with_copies_beside(drawn: Scenario) -> Scenario:
    """Let copies from the pool go on beside the steps of decode workers in half of the runs, as on GPUs."""
    return replace(drawn, copies_beside=Random(f"{drawn.seed}/beside").random() < 1 / 2)


def _on_nodes(drawn: Scenario) -> Scenario:
    """Spread every third run over several nodes if KV can travel between them."""
    draw = Random(f"{drawn.seed}/nodes")
    may_travel = drawn.policy.block_use.why_not_direct is None and "colocated" not in drawn.topology
    if draw.random() > 1 / 3 or not may_travel:
        return drawn
    return replace(drawn, nodes=draw.randint(2, _MOST_NODES), direct=True)
