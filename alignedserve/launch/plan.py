"""List the parts of a deployment and what each is told; on one machine, also the device of each part."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from alignedserve.architectures.families.generic import GenericConfig, check_transformers
from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.given import read_json
from alignedserve.config.config import Config, dump
from alignedserve.core import WORKERS, Role
from alignedserve.errors import AlignedServeError
from alignedserve.kvpool.arena.shared_files import check_space, remove_stale
from alignedserve.machine.resources import allow_open_files
from alignedserve.protocol.messages import ROUTER, rank_suffix
from alignedserve.shell.clock import ClockOrigin
from alignedserve.shell.control import door_of
from alignedserve.shell.links import PREFIX, inbox, remove_dead_sockets
from alignedserve.shell.part import PartSpec
from alignedserve.sizing.adapters import check_names
from alignedserve.sizing.capacity import capacity
from alignedserve.sizing.claims import Claim, one_plans
from alignedserve.sizing.memory import (
    SHARED_RECORDS,
    FreeMemory,
    check_machine,
    machine_demand,
    shared_memory,
    use_of,
)
from alignedserve.sizing.model_folder import model_folder
from alignedserve.sizing.sizes import told, with_sizes
from alignedserve.store.storage import is_on

LOOPBACK = "127.0.0.1"
_FILES, _FILES_PER_PART = 128, 4  # open files of a part, and of its links with each other part; measured: 78 of 6 parts


def new_deployment() -> str:
    """Return a name that no other deployment has, also on other machines: incarnations begin at 1 in each."""
    return f"{PREFIX}{secrets.token_hex(4)}"


def parts_of(config: Config) -> list[tuple[Role, str]]:
    """Return the role and the name of every part."""
    topology = config.topology
    names = [(Role.ROUTER, ROUTER), (Role.POOL, "pool-0")]
    names += [(Role.PREFILL, f"prefill-{number}") for number in range(topology.prefill_workers)]
    names += [(Role.DECODE, f"decode-{number}") for number in range(topology.decode_workers)]
    names += [(Role.GATEWAY, f"gateway-{number}") for number in range(config.server.gateways)]
    return names + ([(Role.JOBS, "jobs-0")] if is_on(config.jobs) else [])


def check_open_files(config: Config) -> None:
    """Raise where a process may not open as many files as a part needs.

    Without a file for a link ZeroMQ accepts none and says nothing, and the deployment would never be ready."""
    needed = _FILES + _FILES_PER_PART * len(parts_of(config))
    if (allowed := allow_open_files(needed)) < needed:
        raise AlignedServeError(
            f"a process may open {allowed} files here and needs {needed}: raise the limit with `ulimit -n {needed}`, "
            f"or start the container with --ulimit nofile={needed}"
        )


@dataclass(frozen=True)
class Plan:
    """A deployment on one machine."""

    config: Config  # with all sizes
    specs: list[PartSpec]
    sizes: list[str]  # in lines for the user
    claim: Claim


def plan(config: Config) -> Plan:
    """Return the parts of a deployment on one machine, after all checks that need no process."""
    folder = model_folder(config)
    model = read_config(folder)
    if isinstance(model, GenericConfig):
        check_transformers(folder, model.architecture)
    read_json(folder / "tokenizer.json")  # which the gateway needs: better no part starts than all but one
    directory = Path(config.kvpool.directory)
    remove_stale(directory, PREFIX)
    remove_dead_sockets()
    check_names(config)
    deployment = new_deployment()
    with one_plans():
        asked, free = config, FreeMemory.here(directory)
        config = with_sizes(config, model, folder, free)
        room = capacity(config, model)
        check_space(directory, SHARED_RECORDS + shared_memory(config, model, room), use_of(config))
        check_machine(config, model, room, folder, free)
        claim = Claim.make(directory, deployment, machine_demand(config, model, room, folder))
    router = inbox(deployment, ROUTER)
    parts = [
        (role, f"{name}{rank_suffix(rank)}", rank)
        for role, name in parts_of(config)
        for rank in range(config.engine.tensor_parallel_size if role in WORKERS else 1)
    ]
    specs, devices = specs_of(config, parts, lambda _: "local", deployment, LOOPBACK, router), itertools.count()
    placed = [replace(spec, device=next(devices) if spec.role in WORKERS else 0, is_private=True) for spec in specs]
    return Plan(config, placed, told(asked, config, model, room, free), claim)


def specs_of(
    config: Config,
    parts: Iterable[tuple[Role, str, int]],
    node_of: Callable[[Role], str],
    deployment: str,
    host: str,
    router: str,
) -> list[PartSpec]:
    """Return the specs of these parts, each with its role, name and rank, for a router at this address."""
    tree, door, origin = dump(config), str(door_of(config.server.port)), ClockOrigin.read()
    return [
        PartSpec(
            *(role, name, node_of(role), deployment, host, router, tree, origin),
            rank=rank,
            door=door,
            lends=config.lends and role is Role.PREFILL,
        )
        for role, name, rank in parts
    ]
