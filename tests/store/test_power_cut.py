"""Tests that a store on a disk that loses what was not synced has all that it acknowledged, and nothing half."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from alignedserve.config.sections import JobsConfig
from alignedserve.store.storage import Storage, open_storage
from alignedserve.store.store import Holder, ListPage
from tests.power_cut import Power
from tests.rare import rarely
from tests.store.storing import GONE, LEASE, ME, TOLD, jobs_on, response_of, result_of, state_of_file, state_of_job

AFTER = 1_000  # the life of those who look after a cut


class Promised:
    """The states that each thing may have after a power cut, by what was told."""

    def __init__(self, before: dict[str, str], told: bytes) -> None:
        """`before` are the states before the first line."""
        self.lease, self.may_be = 0, {thing: [state] for thing, state in before.items()}
        lines = [line.split() for line in told.decode().splitlines()]
        for mark, thing, state in (line for line in lines if len(line) == 3):  # others are torn
            states = self.may_be.setdefault(thing, [GONE])
            if thing == LEASE:
                self.lease = int(state)
            elif mark == "?":
                states.append(state)
            elif state in states:  # else another process has acknowledged a later state already
                del states[: states.index(state)]
        self.may_be.pop(LEASE, None)

    def check(self, jobs: JobsConfig) -> dict[str, str]:
        """Open the store after a cut; return the state of each thing that it has."""
        found, lease = asyncio.run(self._look(jobs))
        for thing in sorted({*self.may_be, *found}):
            state, may_be = found.get(thing, GONE), self.may_be.get(thing, [GONE])
            assert state in may_be, f"{thing} is {state}, and was told to be {' or '.join(may_be)}"
        assert lease > self.lease, "the lease of the next life has the number of one before"
        return found

    async def _look(self, jobs: JobsConfig) -> tuple[dict[str, str], int]:
        gateway, runner = [await open_storage(jobs, Holder(role, AFTER)) for role in ("gateway", "runner")]
        try:
            for storage in (runner, gateway):
                await storage.sweep()
            states = await _files(gateway) | await _jobs(gateway)
            for id in [thing for thing in self.may_be if thing.startswith("resp")]:
                if (response := await gateway.store.response(ME, id)) is not None:
                    assert response == response_of(id, int(response.previous or 0))
                    states[id] = str(response.previous)
            assert await gateway.store.find_faults() == []
            return states, await runner.store.lease(runner.holder, 1_000) or 0
        finally:
            for storage in (runner, gateway):
                await storage.close()


async def _files(storage: Storage) -> dict[str, str]:
    files = await storage.store.files(ME, ListPage(1_000))
    assert files is not None
    assert storage.blobs.sizes() == {file.id: file.bytes for file in files.records}
    return {file.id: state_of_file(storage.blobs.open(file.id).read()) for file in files.records}


async def _jobs(storage: Storage) -> dict[str, str]:
    jobs, states = await storage.store.jobs(ME, ListPage(1_000)), dict[str, str]()
    assert jobs is not None
    for job in jobs.records:
        results = [result async for result in storage.store.results(job.id)]
        num_lines = len(results) if job.is_open else job.counts.completed
        assert results == [result_of(job.id, line) for line in range(1, num_lines + 1) if job.is_open]
        assert (await storage.store.counts(job.id)).completed == len(results)
        states[job.id] = state_of_job(job.status, num_lines)
    return states


def store(power: Power, life: int, seed: int, kill_at: float = math.inf, tear: float | None = None) -> None:
    """Let a gateway and a job runner use the store, and kill both once the notes have `kill_at` bytes. With `tear`,
    first kill one of them in the middle of a write, when this share of the write is on the disk."""
    command = [sys.executable, "-m", "tests.store.storing", str(power.folder), str(life), str(seed)]
    process = subprocess.Popen(command, env={**os.environ, **power.environment}, start_new_session=True)
    while process.poll() is None:
        if power.num_bytes >= kill_at:
            if tear is not None:
                power.tear(tear)
                while not power.torn_by and process.poll() is None:
                    time.sleep(0.005)
            with power.no_turn(), suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        time.sleep(0.005)
    power.tear_nothing()
    of_killed = (-signal.SIGKILL, 256 - signal.SIGKILL) if kill_at < math.inf else ()  # the latter of a dead child
    assert process.returncode in (0, *of_killed)


@pytest.mark.parametrize(("seed", "num_cuts"), [(1, 15), *(rarely((seed, 60)) for seed in range(2, 102))])
def test_what_a_store_acknowledged_is_there_after_a_power_cut_at_any_moment(
    tmp_path: Path, seed: int, num_cuts: int
) -> None:
    """A gateway and a job runner are killed, start again and end; at any moment the disk may lose its power. Some are
    killed in the middle of a write."""
    tears = Random(f"{seed}/tears")
    draw, disk, states = Random(seed), tmp_path / "disk-0", dict[str, str]()
    disk.mkdir()
    for generation in (1, 2):
        (disk / TOLD).write_bytes(b"")
        power = Power(disk, tmp_path / f"power-{generation}")
        tear = tears.choice((None, tears.random()))
        store(power, 2 * generation - 1, seed, draw.randint(0, 4_000_000), tear)
        store(power, 2 * generation, seed)
        cuts, before = set(draw.sample(range(power.num_changes + 1), num_cuts)), states
        for number, at in enumerate(power.moments()):
            if number in cuts:
                shutil.rmtree(disk := tmp_path / f"disk-{generation}", ignore_errors=True)
                at.cut(disk, draw if draw.random() < 0.7 else None)
                states = Promised(before, at.read(TOLD)).check(jobs_on(disk, seed))
