"""Tests that clients get files and batches of OpenAI's shape: by the types of its SDK, and by its published schema."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import Batch, FileDeleted, FileObject
from pydantic import BaseModel

from tests.gateway.published import validator
from tests.jobs.conftest import Service, ended, line, submit, upload


def check(body: Any, name: str, kind: type[BaseModel] | None = None) -> None:
    validator(name).validate(body)
    if kind is not None:
        kind.model_validate(body)


@pytest.mark.parametrize("config", ["sqlite"], indirect=True)
def test_files_and_batches(service: Service) -> None:
    async def asked() -> None:
        async with service.client() as client, service.running():
            file = (await upload(client, line("a"))).json()
            check(file, "OpenAIFile", FileObject)
            lives = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
            check((await upload(client, line("b"), **lives)).json(), "OpenAIFile", FileObject)
            check((await client.get("/v1/files")).json(), "ListFilesResponse")
            good = await submit(client, line("a") + b"\n" + line("b", temperature=9))
            bad = await submit(client, b"{")
            for made in (good, bad):
                check(made, "Batch", Batch)
                check(await ended(client, made["id"]), "Batch", Batch)
            check((await client.get("/v1/batches")).json(), "ListBatchesResponse")
            check((await client.get("/v1/batches", params={"after": bad["id"]})).json(), "ListBatchesResponse")
            check((await client.delete(f"/v1/files/{file['id']}")).json(), "DeleteFileResponse", FileDeleted)
            check((await client.get(f"/v1/files/{file['id']}")).json(), "ErrorResponse")

    service.run(asked)
