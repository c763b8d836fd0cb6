"""List the parts of a deployment and what each is told; on one machine, also the device of each part.

An embedding model (`embed`) has a router and a worker of its own, so that chats are placed as if they were alone. The
deployment is one for its launcher, and two for its parts; gateways and the job runner are members of both:

    gateway-0 ──▶ router ──▶ decode-0, pool-0, ...
        └──────▶ router-embed ──▶ decode-embed
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from alignedserve.architectures.families.generic import GenericConfig, check_transformers
from alignedserve.architectures.families.model_config import ModelConfig, read_config
from alignedserve.architectures.given import read_json
from alignedserve.architectures.model_source import name_of
from alignedserve.architectures.vectors import read_pooled
from alignedserve.architectures.weight_files import weights_mark
from alignedserve.config.choices import DeviceKind, LoadFormat, ModelNames
from alignedserve.config.config import Config, dump, of_preset, parse
from alignedserve.config.presets import DEFAULT
from alignedserve.core import OWNERS, WORKERS, Role
from alignedserve.errors import AlignedServeError, ConfigError, MemoryTooSmall
from alignedserve.launch.preflight import NO_GPUS, visible_gpus
from alignedserve.launch.roles import NodeOffer, choose
from alignedserve.machine.resources import allow_open_files
from alignedserve.machine.shared_files import check_space, remove_stale
from alignedserve.protocol.messages import ROUTER, rank_suffix
from alignedserve.shell.clock import ClockOrigin
from alignedserve.shell.control import door_of
from alignedserve.shell.links import PREFIX, inbox, remove_dead_sockets
from alignedserve.shell.part import EmbedSide, PartSpec
from alignedserve.sizing.adapters import check_names
from alignedserve.sizing.capacity import capacity
from alignedserve.sizing.claims import Claim, one_plans
from alignedserve.sizing.memory import (
    SHARED_RECORDS,
    FreeMemory,
    check_machine,
    demand,
    machine_demand,
    shared_memory,
    use_of,
)
from alignedserve.sizing.model_folder import model_folder
from alignedserve.sizing.sizes import told, with_sizes
from alignedserve.store.storage import is_on

LOOPBACK = "127.0.0.1"
_EMBED = "embed"  # ends the names of the embedding model's parts
_EMBED_PART = 4  # of the memory
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


def needed_files(config: Config) -> int:
    """Return how many files a process of the deployment has to be able to open."""
    return _FILES + _FILES_PER_PART * (len(parts_of(config)) + 2 * (config.embed is not None))


def check_open_files(config: Config) -> None:
    """Raise where a process may not open as many files as a part needs.

    Without a file for a link ZeroMQ accepts none and says nothing, and the deployment would never be ready."""
    needed = needed_files(config)
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
    claims: list[Claim]


def plan(config: Config) -> Plan:
    """Return the parts of a deployment on one machine, after all checks that need no process."""
    folder = model_folder(config)
    model = _checked_model(folder)
    config, chosen = choose(config, [_this_machine(config)], model, folder)
    check_open_files(config)
    directory = Path(config.kvpool.directory)
    remove_stale(directory, PREFIX)
    remove_dead_sockets()
    check_names(config)
    deployment = new_deployment()
    with one_plans():
        beside = None if config.embed is None else _plan_embedding(embedding_config(config), deployment)
        asked, free = config, FreeMemory.here(directory)  # without what the embedding model claims
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
    longest = read_pooled(folder, model).longest
    specs, devices = specs_of(config, parts, lambda _: "local", deployment, LOOPBACK, router), itertools.count()
    placed = [replace(spec, device=next(devices) if spec.role in WORKERS else 0, is_private=True) for spec in specs]
    sizes = [*chosen, *told(asked, config, model, room, free, longest)]
    if beside is None:
        return Plan(config, placed, sizes, [claim])
    first = beside.specs[0]
    side = EmbedSide(first.deployment, first.router, first.config)
    placed = [replace(spec, embed=side if spec.role in OWNERS else None) for spec in placed]
    return Plan(config, [*placed, *beside.specs], [*sizes, *beside.sizes], [claim, *beside.claims])


def _this_machine(config: Config) -> NodeOffer:
    gpus = visible_gpus() if config.engine.on_gpu else NO_GPUS
    return NodeOffer("this machine", gpus=gpus.number, gpu=gpus)


def _checked_model(folder: Path) -> ModelConfig:
    model = read_config(folder)
    if isinstance(model, GenericConfig):
        check_transformers(folder, model.architecture)
    read_json(folder / "tokenizer.json")  # which the gateway needs: better no part starts than all but one
    return model


def embedding_config(config: Config) -> Config:
    """Return the settings of the embedding model's parts: the usual ones, and of the deployment's those that are not
    about its model."""
    engine, named = config.engine, name_of(config.embed or "")
    if named in config.model_names:
        raise ConfigError(f"--embed {config.embed} is the model that is served: it makes vectors without")
    own = {
        "model": config.embed,
        "served_model_name": ModelNames((named,)),
        "cache_directory": config.cache_directory,
        "engine.device": DeviceKind.CPU,
        "engine.profile_s": engine.profile_s,
        "engine.tune_s": engine.tune_s,
        "engine.threads": engine.threads,
        "kvpool.directory": config.kvpool.directory,
        "jobs.store": "off",
    }
    usual = of_preset(DEFAULT, own)
    usual = replace(usual, model=str(model_folder(usual)))
    same = {name: getattr(config, name) for name in ("server", "wire", "slo", "price", "launch", "log")}
    return replace(usual, **same)


def _plan_embedding(config: Config, chats: str) -> Plan:
    """Return the parts of the embedding model beside the deployment `chats`. It may have a quarter of the memory, or
    what it needs."""
    folder, directory = model_folder(config), Path(config.kvpool.directory)
    deployment = f"{chats}-e"  # so all of it is cleaned with `chats`; a socket's path must be short
    model, free = _checked_model(folder), FreeMemory.here(directory)
    least = replace(free, available=None if free.available is None else free.available // _EMBED_PART)
    try:
        config = with_sizes(config, model, folder, least)
    except MemoryTooSmall:
        config = with_sizes(config, model, folder, free)
    needs = demand(config, model, capacity(config, model), folder)
    claim = Claim.make(directory, deployment, needs.total)  # it has no pool
    parts = [(role, f"{role.value}-{_EMBED}", 0) for role in (Role.ROUTER, Role.DECODE)]
    router = inbox(deployment, ROUTER)
    specs = specs_of(config, parts, lambda _: "local", deployment, LOOPBACK, router)
    line = f"embed: {config.served_model_name} on the CPU: {needs} (--embed)"
    return Plan(config, [replace(spec, of_embed=True, is_private=True) for spec in specs], [line], [claim])


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
    weights = _weights(config)
    return [
        PartSpec(
            *(role, name, node_of(role), deployment, host, router, tree, origin),
            rank=rank,
            door=door,
            lends=config.lends and role is Role.PREFILL,
            weights=weights,
        )
        for role, name, rank in parts
    ]


def other_weights(specs: Iterable[PartSpec]) -> str:
    """Return the folder of a model that has other weights now than when these parts were planned; empty if none has.
    Raise a ModelError where a folder cannot be read."""
    for spec in {spec.weights: spec for spec in specs if spec.weights}.values():
        if _weights(config := parse(spec.config)) != spec.weights:
            return config.model
    return ""


def _weights(config: Config) -> str:
    """Return the mark of the model's weights; empty if they are random."""
    return "" if config.engine.load_format is LoadFormat.DUMMY else weights_mark(model_folder(config))
