"""The launcher that runs each part as a Ray actor.

Ray places the actors and sees them die; messages and KV do not travel through it. Here a deployment has a Ray of its
own, on this machine only, which begins and ends with it; cluster.py starts the same actors on the nodes of a cluster.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
import time
import traceback
from abc import abstractmethod
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

from alignedserve.config.config import Config, parse
from alignedserve.errors import AlignedServeError, CastOut, DeviceLost, RankLost
from alignedserve.launch.ending import Ending
from alignedserve.launch.keeper import Keeper, say
from alignedserve.launch.plan import Machine
from alignedserve.launch.start import start
from alignedserve.safe_path import ABOVE
from alignedserve.shell.exit_code import ExitCode
from alignedserve.shell.listener import bind
from alignedserve.shell.logs import never_fail_to_print, set_up
from alignedserve.shell.part import PartSpec, Stoppable

log = logging.getLogger("alignedserve.parts")

STORE_BYTES = 80 << 20  # of Ray's object store, about its smallest size: nothing is put there
ANSWER_S = 2.0  # for actors to answer that they stop
LOGS_S = 0.5  # for the last log lines of the parts to come through Ray, which looks for them every 0.1 s

# Variables that Ray reads as it is imported and hands on to its processes.
LINES = {  # for the log lines of parts, which Ray brings to the launcher's output
    "RAY_DEDUP_LOGS": "0",
    "RAY_DISABLE_WORKER_LOG_PREFIX": "1",  # our lines name their part
    "RAY_COLOR_PREFIX": "0",
}
SETTINGS = {
    **LINES,
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray listens on loopback only: on every system, whatever the name says
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray hides no device from parts that ask it for none
}


class PartActor:
    """A part as an actor: its call `run` takes as long as the part lives."""

    def __init__(self, spec: str) -> None:
        self._spec = _here(PartSpec.from_json(spec))
        self._part: Stoppable | None = None
        self._meeting: socket.socket | None = None

    def meeting(self) -> str:
        """Return host:port on this node where the ranks of this life can meet; bound as long as the process lives."""
        self._meeting = bind(self._spec.host, 0)
        return f"{self._spec.host}:{self._meeting.getsockname()[1]}"

    def run(self, ranks_at: str) -> str:
        """Run the part. Return in one line why it cannot run at all, or nothing if another start may help."""
        self._spec = replace(self._spec, ranks_at=ranks_at)
        try:
            never_fail_to_print()
            set_up(parse(self._spec.config).log, self._spec.name)
            start(self._spec, self._on_start)
        except (CastOut, DeviceLost, RankLost) as error:
            log.error("%s", error)
        except AlignedServeError as error:
            return str(error)
        except BaseException:
            traceback.print_exc()
            os._exit(ExitCode.BROKEN)  # frees all that the process still holds
        return ""

    def stop(self) -> bool:
        """Have the part stop by itself. Return False where it cannot: it is not set up yet."""
        if self._part is None:
            return False
        self._part.stop()
        return True

    def _on_start(self, part: Stoppable) -> None:
        self._part = part


def _here(spec: PartSpec) -> PartSpec:
    """Return the spec with this node filled in, if Ray has chosen the node."""
    if spec.node:
        return spec
    import ray

    return replace(spec, node=ray.get_runtime_context().get_node_id()[-12:], host=ray.util.get_node_ip_address())


class OnRay(Keeper):
    """Keeps every part as an actor; a subclass says where."""

    def __init__(self, ray: Any, config: Config, specs: Sequence[PartSpec], ending: Ending) -> None:
        super().__init__(config, specs)
        self._ray, self._ending = ray, ending
        self._actors: dict[str, Any] = {}
        ending.left = self._alive.copy

    def hear_signals(self) -> None:
        super().hear_signals()
        self._ending.hear_signals()

    @abstractmethod
    def place(self, part: str) -> dict[str, Any]:
        """Return the options of the part's actor: its resources and its place."""

    def start(self, spec: PartSpec) -> None:
        if not any(node["Alive"] for node in self._ray.nodes()):
            raise AlignedServeError("Ray has died, and every part with it")
        if spec.name in self._actors:
            self.end(spec.name)  # its process may still be there
        named = type(spec.name, (PartActor,), {})  # Ray names the process by its class
        options = {
            "name": f"{spec.deployment}-{spec.name}.{spec.incarnation}",
            "max_restarts": 0,  # the keeper starts it again: it tells the router first, and counts deaths
            "max_task_retries": 0,
            "max_concurrency": 2,  # `stop`, while `run` runs
            **self.place(spec.name),
        }
        actor = self._ray.remote(named).options(**options).remote(spec.to_json())
        self._actors[spec.name] = actor
        actor.__ray_ready__.remote().future().add_done_callback(lambda _: self.began(spec.name))
        self.launch(actor, spec)

    def launch(self, actor: Any, spec: PartSpec) -> None:
        """Have the actor run the part, and hear when that has ended."""
        actor.run.remote(spec.ranks_at).future().add_done_callback(lambda run: self._ended(spec, run))

    def _ended(self, spec: PartSpec, run: Future[str]) -> None:
        error = run.exception()
        if error is None:
            self.ended(spec, 0, run.result())
        else:
            self.ended(spec, type(error).__name__)

    def ask_to_stop(self, parts: Collection[str]) -> None:
        asked = {
            part: self._actors[part].stop.remote() for part in parts if part in self._actors
        }  # others have no place
        if asked:
            self._ray.wait([*asked.values()], num_returns=len(asked), timeout=ANSWER_S)
        for part, answer in asked.items():
            if not self._stops(answer):
                self.end(part)

    def _stops(self, answer: Any) -> bool:
        """Return whether the actor has answered that it stops."""
        try:
            return bool(self._ray.get(answer, timeout=0))
        except self._ray.exceptions.RayError:
            return False

    def _stop_all(self) -> None:
        self._ending.begin(is_wanted=self._asked_to_stop is not None)
        super()._stop_all()
        self._wait_until_ended(self._alive, ANSWER_S)
        left = self._alive & self._actors.keys()
        if left and not self._is_hurried:
            say(f"{', '.join(sorted(left))} may still run where Ray does not reach them; it ends them when it does")

    def end(self, part: str) -> None:
        if part in self._actors:
            with suppress(Exception):  # Ray raises errors of many kinds; its end is not heard, and said when all ends
                self._ray.kill(self._actors[part])

    def forget(self, part: str) -> None:
        """End the actor of a part that has ended: its process, and what is reserved for it, may still be there."""
        self.end(part)
        self._actors.pop(part, None)


class _OnOwnRay(OnRay):
    """Keeps the parts on a Ray that begins and ends with the deployment."""

    def __init__(self, ray: Any, config: Config, specs: Sequence[PartSpec], machine: Machine) -> None:
        super().__init__(ray, config, specs, Ending(config.server.drain_s))
        self._machine = machine
        self._group: Any = None
        self._bundles = {spec.name: number for number, spec in enumerate(specs)}

    def run(self) -> int:
        self.hear_signals()  # also while Ray starts, which takes seconds
        _start(self._ray, processes=len(self._bundles))
        try:
            # The parts of a node share its memory, so they are placed together.
            self._group = self._ray.util.placement_group([{"CPU": 1} for _ in self._bundles], strategy="STRICT_PACK")
            return super().run()
        finally:
            self._ending.begin()
            time.sleep(LOGS_S)
            self._ray.shutdown()

    def place(self, part: str) -> dict[str, Any]:
        if part not in self._bundles:
            return {"num_cpus": 0}  # it was not planned: Ray has as many CPUs as planned parts
        return {"num_cpus": 1, "scheduling_strategy": in_group(self._ray, self._group, self._bundles[part])}

    def another(self, spec: PartSpec) -> PartSpec:
        return self._machine.place(spec)

    def forget(self, part: str) -> None:
        super().forget(part)
        self._machine.leave(part)


def in_group(ray: Any, group: Any, bundle: int) -> Any:
    strategies = ray.util.scheduling_strategies
    return strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)


def serve_on_ray(config: Config, specs: Sequence[PartSpec], machine: Machine) -> int:
    """Serve until stopped, and return the exit code."""
    # A key for this deployment only; otherwise Ray shares one key among all and keeps it in the home directory.
    os.environ.update(SETTINGS, RAY_AUTH_TOKEN=secrets.token_hex(32))
    try:
        import ray
    except ImportError:
        raise no_ray() from None
    return _OnOwnRay(ray, config, specs, machine).run()


def job_config(ray: Any) -> Any:
    """Return the settings of our job: its actors find modules where this process does.

    Ray would put the working directory first on their path, but for jobs that it takes for those of a remote client."""
    return ray.job_config.JobConfig(_client_job=True, _py_driver_sys_path=[] if ABOVE in sys.path else [ABOVE])


def no_ray() -> AlignedServeError:
    return AlignedServeError("the launcher ray needs Ray: pip install 'alignedserve[ray]'")


def _start(ray: Any, processes: int) -> None:
    try:
        ray.init(
            address="local",  # its own, also where another Ray runs
            job_config=job_config(ray),
            num_cpus=processes,  # processes that Ray starts at once, for the actors
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            logging_level="warning",
        )
    except Exception as error:  # Ray raises errors of many kinds here
        raise AlignedServeError(f"Ray does not start: {error}") from error
