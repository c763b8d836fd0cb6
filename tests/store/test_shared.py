"""Tests that deployments of one model may share a store, and that a deployment of another model is refused."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from alignedserve.config.sections import JobsConfig
from alignedserve.errors import StoreTaken
from alignedserve.store.job import Endpoint, Job, JobStatus
from alignedserve.store.storage import check_shared, check_storage, holder_of, open_storage
from alignedserve.store.store import LastLease, Store
from tests.store.conftest import Kind

DEMO, OTHER = holder_of("first", "jobs", 1, "demo"), holder_of("second", "jobs", 1, "other")


def job(expires_at: float) -> Job:
    return Job(
        "batch_1", "ann", "file-1", Endpoint.CHAT, "1h", int(time.time()), int(expires_at), JobStatus.IN_PROGRESS
    )


def test_the_store_knows_which_model_has_it(kind: Kind) -> None:
    async def check(store: Store) -> None:
        assert await store.last_lease() is None
        await store.lease(DEMO, 1_000)
        assert await store.last_lease() == LastLease("demo", DEMO.name)
        await store.release(DEMO)
        assert await store.last_lease() == LastLease("demo", None)
        await store.lease(replace(OTHER, keys="ab"), -1.0)
        assert await store.last_lease() == LastLease("other", None, "ab"), "a lease that is over holds nothing"

    kind.run(check)


def test_another_model_is_refused_while_batches_of_the_first_have_not_ended(kind: Kind) -> None:
    jobs, now = JobsConfig(directory="/jobs"), time.time()

    async def check(store: Store) -> None:
        await check_shared(store, jobs, OTHER, now)
        await store.lease(DEMO, 1_000)
        await check_shared(store, jobs, replace(OTHER, model="demo"), now)
        with pytest.raises(StoreTaken, match=r"/jobs is not for other: .*/first/jobs serves demo with it; give .* own"):
            await check_shared(store, jobs, OTHER, now)
        await store.release(DEMO)
        await check_shared(store, jobs, OTHER, now)
        await store.add_job(job(now + 3_600))
        with pytest.raises(StoreTaken, match=r"batches for demo have not ended \(1\)"):
            await check_shared(store, jobs, OTHER, now)
        await check_shared(store, jobs, OTHER, now + 3_601)  # nobody would ever end them

    kind.run(check)


def test_keys_of_other_names_are_refused_while_another_deployment_has_the_store(kind: Kind) -> None:
    """Each would cancel the other's batches as those of revoked keys."""
    jobs, now = JobsConfig(directory="/jobs"), time.time()
    first, second = replace(DEMO, keys="ann"), holder_of("second", "gateway-0", 1, "demo", "ann bob")

    async def check(store: Store) -> None:
        await store.lease(first, 1_000)
        await check_shared(store, jobs, replace(second, keys="ann"), now)
        await check_shared(store, jobs, holder_of("first", "gateway-0", 1, "demo", "ann bob"), now)  # a key was added
        with pytest.raises(StoreTaken, match=r"/first/jobs serves with keys of other names; give .* own"):
            await check_shared(store, jobs, second, now)
        await store.add_job(job(now + 3_600))
        await store.release(first)
        await check_shared(store, jobs, second, now)  # it began again after a key was added

    kind.run(check)


def test_a_second_deployment_with_the_folder_does_not_start(tmp_path: Path) -> None:
    named = JobsConfig(directory=str(tmp_path / "jobs"))
    jobs = check_storage(named, "demo", 8000)

    async def lease(is_left: bool = False) -> None:
        storage = await open_storage(jobs, DEMO)
        await (storage.store.release(DEMO) if is_left else storage.store.lease(DEMO, 1_000))
        await storage.close()

    asyncio.run(lease())
    assert check_storage(named, "demo", 8001) == jobs, "two deployments of one model share it"
    with pytest.raises(StoreTaken, match=r"the store .*/jobs is not for other: .*with --jobs-directory"):
        check_storage(named, "other", 8001)
    asyncio.run(lease(is_left=True))
    assert check_storage(named, "other", 8001) == jobs
