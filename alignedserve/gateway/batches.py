"""/v1/batches: jobs are submitted, looked at and cancelled here; the job runner does the rest."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any, Literal
from uuid import uuid4

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from alignedserve.config.config import JobsConfig
from alignedserve.errors import Conflict
from alignedserve.gateway.files import EXPIRES_S, Open, Route, file_of, listed, page_of
from alignedserve.gateway.http.bodies import Bodies
from alignedserve.gateway.http.middleware import caller_of
from alignedserve.gateway.openai.admission import GatewaySettings
from alignedserve.gateway.openai.errors import ApiError, invalid
from alignedserve.gateway.openai.parsing import parsed
from alignedserve.gateway.openai.strict import Strict
from alignedserve.store.job import Counts, Endpoint, Forecast, Job, Problem, Status
from alignedserve.store.opening import Keeping
from alignedserve.store.store import OverQuota, Purpose

MOST_LISTED, USUALLY_LISTED = 100, 20
WINDOW_S = (600, 7 * 86_400)  # 10m to 7d
_WINDOW = "^([1-9][0-9]{0,5})([mhd])$"
_UNITS = {"m": 60, "h": 3_600, "d": 86_400}
_MOST_PAIRS, _MOST_KEY, _MOST_VALUE = 16, 64, 512
_MOST_BODY_BYTES = 1 << 16
MOST_UNFINISHED = 100  # batches of a caller that have not ended
_MOST_TRIES = 20  # of a change that others' changes come between


class _ExpiresAfter(Strict):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=EXPIRES_S[0], le=EXPIRES_S[1])


class NewBatch(Strict):
    """OpenAI's fields; `weight` is ours."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: str = Field(json_schema_extra={"pattern": _WINDOW})
    metadata: dict[str, str] | None = Field(None, max_length=_MOST_PAIRS)
    output_expires_after: _ExpiresAfter | None = None
    weight: float = Field(1.0, ge=0.01, le=100)

    @field_validator("completion_window")
    @classmethod
    def _known(cls, window: str) -> str:
        if not WINDOW_S[0] <= window_s(window) <= WINDOW_S[1]:
            raise PydanticCustomError("no_window", "must be 10m to 7d, written such as 30m, 4h or 2d")
        return window

    @field_validator("metadata")
    @classmethod
    def _short(cls, metadata: dict[str, str] | None) -> dict[str, str] | None:
        for key, value in (metadata or {}).items():
            if len(key) > _MOST_KEY or len(value) > _MOST_VALUE:
                message = f"keys have at most {_MOST_KEY} characters, values {_MOST_VALUE}"
                raise PydanticCustomError("too_long", message, {"field": key[:_MOST_KEY]})
        return metadata


def window_s(window: str) -> int:
    """0 where it is none."""
    written = re.fullmatch(_WINDOW, window)
    return int(written[1]) * _UNITS[written[2]] if written else 0


class BatchRoutes:
    def __init__(self, keeping: Open, config: JobsConfig) -> None:
        self._keeping, self._config = keeping, config
        self._bodies = Bodies(_MOST_BODY_BYTES, GatewaySettings.body_limit_s)

    @property
    def routes(self) -> Sequence[Route]:
        return (
            ("POST", "/v1/batches", self.add),
            ("GET", "/v1/batches", self.list),
            ("GET", "/v1/batches/{id}", self.get),
            ("POST", "/v1/batches/{id}/cancel", self.cancel),
        )

    async def add(self, http: HttpRequest) -> Response:
        async with self._bodies.read(http) as sent:
            asked = parsed(NewBatch, sent)
        keeping, caller = await self._keeping(), caller_of(http)
        file = await file_of(keeping, caller.id, asked.input_file_id, "input_file_id")
        if file.purpose is not Purpose.BATCH:
            raise invalid(f"{file.id} is for {file.purpose.value}, not for batch", "input_file_id")
        job, most = _job_of(asked, caller.id, caller.salt), MOST_UNFINISHED
        try:
            await keeping.store.add_job(job, most)
        except OverQuota as error:
            message = f"{error.taken.open_jobs} of your batches have not ended, the limit is {most}"
            raise ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": "60"}) from None
        return JSONResponse(batch_object(job, Counts()))

    async def list(self, http: HttpRequest) -> Response:
        page, keeping = page_of(http, MOST_LISTED, USUALLY_LISTED), await self._keeping()
        found = await keeping.store.jobs(caller_of(http).id, page, time.time())
        counts = {job.id: await _counts(keeping, job) for job in (found.records if found else ())}
        return JSONResponse(listed(found, page, lambda job: batch_object(job, counts[job.id])))

    async def get(self, http: HttpRequest) -> Response:
        keeping, job = await self._found(http)
        forecast = await keeping.store.forecast(job.id) if job.is_open else None
        headers = {} if forecast is None else forecast_headers(forecast)
        return JSONResponse(batch_object(job, await _counts(keeping, job)), headers=headers)

    async def cancel(self, http: HttpRequest) -> Response:
        """What has ended stays as it is."""
        for _ in range(_MOST_TRIES):
            keeping, job = await self._found(http)
            if job.status in (Status.VALIDATING, Status.IN_PROGRESS):
                try:
                    job = await keeping.store.save_job(job.moved(Status.CANCELLING, time.time()))
                except Conflict:  # the job runner has moved it on
                    continue
            elif job.status not in (Status.CANCELLING, Status.CANCELLED):
                raise ApiError(409, f"{job.id} is {job.status.value}: it cannot be cancelled", code="batch_not_open")
            return JSONResponse(batch_object(job, await _counts(keeping, job)))
        message = f"{http.path_params['id']:.80} cannot be changed now: try again"
        raise ApiError(503, message, code="server_is_overloaded", headers={"Retry-After": "1"})

    async def _found(self, http: HttpRequest) -> tuple[Keeping, Job]:
        keeping, id = await self._keeping(), http.path_params["id"]
        job = await keeping.store.job(caller_of(http).id, id)
        if job is None or not job.is_kept(time.time()):
            raise ApiError(404, f"there is no batch {id!r:.80}", param="id", code="batch_not_found")
        return keeping, job


def _job_of(asked: NewBatch, owner: str, salt: str) -> Job:
    created_at = int(time.time())
    lives_s = None if asked.output_expires_after is None else asked.output_expires_after.seconds
    return Job(
        id=f"batch_{uuid4().hex}",
        owner=owner,
        salt=salt,
        input_file_id=asked.input_file_id,
        endpoint=Endpoint(asked.endpoint),
        window=asked.completion_window,
        created_at=created_at,
        expires_at=created_at + window_s(asked.completion_window),
        weight=asked.weight,
        metadata=asked.metadata,
        output_lives_s=lives_s,
    )


async def _counts(keeping: Keeping, job: Job) -> Counts:
    return await keeping.store.counts(job.id) if job.is_open else job.counts


def batch_object(job: Job, counts: Counts) -> dict[str, Any]:
    """By OpenAI's schema no field of it is null: what there is none of, or not yet, is left out."""
    usage = {
        "input_tokens": counts.input_tokens,
        "input_tokens_details": {"cached_tokens": counts.cached_tokens},
        "output_tokens": counts.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts.input_tokens + counts.output_tokens,
    }
    problems = [_problem(one) for one in job.problems]
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


def _problem(problem: Problem) -> dict[str, Any]:
    return {"code": problem.code, "message": problem.message, "param": problem.param, "line": problem.line}


def forecast_headers(forecast: Forecast) -> dict[str, str]:
    """What OpenAI's object has no field for."""
    headers = {
        "x-batch-tokens-per-s": f"{forecast.tokens_per_s:.1f}",
        "x-batch-late": "true" if forecast.is_late else "false",
    }
    if forecast.finish_at is not None:
        headers["x-batch-predicted-finish-at"] = str(int(forecast.finish_at))
    return headers
