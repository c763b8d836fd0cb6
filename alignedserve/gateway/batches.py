"""The routes of /v1/batches, where clients submit, watch and cancel jobs; the job runner does the work."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Literal
from uuid import uuid4

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from alignedserve.config.prices import Prices, price_field
from alignedserve.config.sections import JobsConfig
from alignedserve.errors import Conflict
from alignedserve.gateway.files import EXPIRES_S, HttpRoute, find_file, list_response, need_listing, parse_page
from alignedserve.gateway.http.bodies import Bodies
from alignedserve.gateway.http.limits import MOST_ROWS, LookPace
from alignedserve.gateway.http.middleware import caller_of
from alignedserve.gateway.openai.errors import ApiError, invalid, no_runner
from alignedserve.gateway.openai.strict import Strict, fault, parse_body
from alignedserve.gateway.settings import GatewaySettings
from alignedserve.store.job import Endpoint, Job, JobStatus, LineCounts
from alignedserve.store.storage import OpenStorage, Storage, check_shared
from alignedserve.store.store import OverQuota, Purpose, Store

MOST_LISTED, USUALLY_LISTED = 100, 20
WINDOW_S = (600, 7 * 86_400)  # 10m to 7d
_WINDOW = "^([1-9][0-9]{0,5})([mhd])$"
_OPEN_ROWS = 10  # that a batch which has not ended costs as: its counts are asked for
_UNITS = {"m": 60, "h": 3_600, "d": 86_400}
_MOST_PAIRS, _MOST_KEY, _MOST_VALUE = 16, 64, 512  # of metadata: pairs, characters of a key, of a value
_MOST_BODY_BYTES = 1 << 16
MOST_UNFINISHED = 100  # batches of a caller that have not ended
RUNNER_PATIENCE_S = 10.0  # new jobs wait so long in the store for a job runner: one that died is usually back by then
_MOST_TRIES = 20  # to cancel a job while other changes to it come first


class _ExpiresAfter(Strict):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=EXPIRES_S[0], le=EXPIRES_S[1])


class NewBatch(Strict):
    """The body that submits a job: OpenAI's fields, and our own `weight`."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: str = Field(json_schema_extra={"pattern": _WINDOW})
    metadata: dict[str, str] | None = Field(None, max_length=_MOST_PAIRS)
    output_expires_after: _ExpiresAfter | None = None
    weight: float = Field(1.0, ge=0.01, le=100)

    @field_validator("completion_window")
    @classmethod
    def _check_window(cls, window: str) -> str:
        if not WINDOW_S[0] <= window_s(window) <= WINDOW_S[1]:
            raise PydanticCustomError("no_window", "must be between 10m and 7d, written like 30m, 4h or 2d")
        return window

    @field_validator("metadata")
    @classmethod
    def _check_lengths(cls, metadata: dict[str, str] | None) -> dict[str, str] | None:
        for key, value in (metadata or {}).items():
            if len(key) > _MOST_KEY or len(value) > _MOST_VALUE:
                message = f"a key may have {_MOST_KEY} characters, a value {_MOST_VALUE}"
                raise fault(key[:_MOST_KEY], message, "too_long")
        return metadata


def window_s(window: str) -> int:
    """Return a completion window in seconds, or 0 if it is not written as one."""
    match = re.fullmatch(_WINDOW, window)
    return int(match[1]) * _UNITS[match[2]] if match else 0


class BatchRoutes:
    def __init__(
        self,
        open_storage: OpenStorage,
        config: JobsConfig,
        runner_away_s: Callable[[], float] = lambda: 0.0,
        prices: Prices | None = None,
    ) -> None:
        """`runner_away_s` returns for how long there has been no job runner."""
        self._open_storage, self._config, self._runner_away_s = open_storage, config, runner_away_s
        self._prices = Prices() if prices is None else prices
        self._looks = LookPace(MOST_ROWS, "rows of batches")
        self._bodies = Bodies(lambda: _MOST_BODY_BYTES, GatewaySettings.body_limit_s)

    @property
    def routes(self) -> Sequence[HttpRoute]:
        return (
            ("POST", "/v1/batches", self.add),
            ("GET", "/v1/batches", self.list),
            ("GET", "/v1/batches/{id}", self.get),
            ("POST", "/v1/batches/{id}/cancel", self.cancel),
        )

    async def add(self, http: HttpRequest) -> Response:
        if self._runner_away_s() > RUNNER_PATIENCE_S:
            raise no_runner()
        async with self._bodies.read(http) as sent:
            body = parse_body(NewBatch, sent)
        storage, caller = await self._open_storage(), caller_of(http)
        await check_shared(storage.store, self._config, storage.holder, time.time(), may_take=False)
        file = await find_file(storage, caller.id, body.input_file_id, "input_file_id")
        if file.purpose is not Purpose.BATCH:
            raise invalid(f"{file.id} has the purpose {file.purpose.value}, not batch", "input_file_id")
        job, most = _make_job(body, caller.id, caller.salt), MOST_UNFINISHED
        try:
            await storage.store.add_job(job, most)
        except OverQuota as error:
            message = f"{error.usage.open_jobs} of your batches have not ended, the limit is {most}"
            raise ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": "60"}) from None
        return JSONResponse(batch_object(job, LineCounts(), self._prices))

    async def list(self, http: HttpRequest) -> Response:
        page, storage = parse_page(http, MOST_LISTED, USUALLY_LISTED), await self._open_storage()
        owner = caller_of(http).id
        async with self._looks.turn(owner):
            listing = need_listing(await storage.store.jobs(owner, page, time.time()), page)
            shown = {job.id: await self._shown(storage, job) for job in listing.records}
            self._looks.take(owner, sum(_OPEN_ROWS if job.is_open else 1 for job in listing.records))
        return list_response(listing, lambda job: shown[job.id])

    async def get(self, http: HttpRequest) -> Response:
        storage, job = await self._find(http)
        headers: dict[str, str] = {}  # since OpenAI's batch object has no fields for a forecast
        if job.is_open and (forecast := await storage.store.forecast(job.id)) is not None:
            headers["x-batch-tokens-per-s"] = f"{forecast.tokens_per_s:.1f}"
            headers["x-batch-late"] = "true" if forecast.is_late else "false"
            if forecast.finish_at is not None:
                headers["x-batch-predicted-finish-at"] = str(int(forecast.finish_at))
        return JSONResponse(await self._shown(storage, job), headers=headers)

    async def cancel(self, http: HttpRequest) -> Response:
        """Cancel an open job; a job that has ended in another way is refused with 409."""
        for _ in range(_MOST_TRIES):
            storage, job = await self._find(http)
            if job.status in (JobStatus.VALIDATING, JobStatus.IN_PROGRESS):
                try:
                    job = await storage.store.save_job(job.move(JobStatus.CANCELLING, time.time()))
                except Conflict:  # the job runner has changed it meanwhile
                    continue
            elif job.status not in (JobStatus.CANCELLING, JobStatus.CANCELLED):
                raise ApiError(409, f"{job.id} is {job.status.value}: it cannot be cancelled", code="batch_not_open")
            return JSONResponse(await self._shown(storage, job))
        message = f"{http.path_params['id']:.80} cannot be changed now: try again"
        raise ApiError(503, message, code="server_is_overloaded", headers={"Retry-After": "1"})

    async def _find(self, http: HttpRequest) -> tuple[Storage, Job]:
        storage, id = await self._open_storage(), http.path_params["id"]
        job = await storage.store.job(caller_of(http).id, id)
        if job is None or not job.is_kept(time.time()):
            raise ApiError(404, f"there is no batch {id!r:.80}", param="id", code="batch_not_found")
        return storage, job

    async def _shown(self, storage: Storage, job: Job) -> dict[str, Any]:
        """Return a job as clients see it."""
        return batch_object(*await counted(storage.store, job), self._prices)


def _make_job(body: NewBatch, owner: str, salt: str) -> Job:
    created_at = int(time.time())
    lives_s = None if body.output_expires_after is None else body.output_expires_after.seconds
    return Job(
        id=f"batch_{uuid4().hex}",
        owner=owner,
        salt=salt,
        input_file_id=body.input_file_id,
        endpoint=Endpoint(body.endpoint),
        window=body.completion_window,
        created_at=created_at,
        expires_at=created_at + window_s(body.completion_window),
        weight=body.weight,
        metadata=body.metadata,
        output_lives_s=lives_s,
    )


async def counted(store: Store, job: Job) -> tuple[Job, LineCounts]:
    """Return a job and the counts of its lines. Those of the store go as it ends: where there are none, it may have
    ended since it was read."""
    counts = await store.counts(job.id) if job.is_open else job.counts
    if job.is_open and not counts.done:
        job = await store.job(job.owner, job.id) or job
        counts = job.counts
    return job, counts


def batch_object(job: Job, counts: LineCounts, prices: Prices) -> dict[str, Any]:
    """Return OpenAI's batch object. Its schema allows no null, so fields without a value are left out."""
    usage: dict[str, Any] = {
        "input_tokens": counts.input_tokens,
        "input_tokens_details": {"cached_tokens": counts.cached_tokens},
        "output_tokens": counts.output_tokens,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
        "total_tokens": counts.input_tokens + counts.output_tokens,
    }
    if counts.device_us:
        seconds, joules = counts.device_us / 1e6, counts.millijoules / 1e3
        cost = {"device_seconds": seconds, "joules": joules, "modelled_joules": counts.modelled_mj / 1e3}
        usage["cost"] = cost | price_field(prices.of(seconds, joules))
    problems = [asdict(problem) for problem in job.problems]
    instants = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    fields = {
        "id": job.id,
        "object": "batch",
        "endpoint": job.endpoint.value,
        "model": job.model,
        "errors": {"object": "list", "data": problems} if problems else None,
        "input_file_id": job.input_file_id,
        "completion_window": job.window,
        "status": job.status.value,
        "output_file_id": job.output_file_id,
        "error_file_id": job.error_file_id,
        "created_at": job.created_at,
        "expires_at": job.expires_at,
        **{f"{name}_at": getattr(job, f"{name}_at") for name in instants},
        "request_counts": {"total": job.total, "completed": counts.completed, "failed": counts.failed},
        "usage": usage,
        "metadata": job.metadata,
    }
    return {name: value for name, value in fields.items() if value is not None}
