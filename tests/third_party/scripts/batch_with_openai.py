"""A batch of one request by OpenAI's own client, of several majors: from the upload to the answer."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import openai
from openai.types import Batch, FileObject

url, model, question = sys.argv[1:]
client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
PATH = "/v1/chat/completions"

body = {"model": model, "temperature": 0, "messages": [{"role": "user", "content": question}]}
line = {"custom_id": "a", "method": "POST", "url": PATH, "body": body}


def checked(answer: Any, kind: Any) -> Any:
    """Check what the server sent against the client's type for it: the client itself reads answers without checking."""
    kind.model_validate(json.loads(answer.text), strict=True)
    return answer.parse()


raw_files, raw_batches = client.files.with_raw_response, client.batches.with_raw_response
sent = ("x.jsonl", json.dumps(line).encode())
file = checked(raw_files.create(file=sent, purpose="batch"), FileObject)
checked(raw_files.retrieve(file.id), FileObject)
created = raw_batches.create(input_file_id=file.id, endpoint=PATH, completion_window="24h")
batch = checked(created, Batch)
deadline = time.monotonic() + 60
while batch.status in ("validating", "in_progress", "finalizing") and time.monotonic() < deadline:
    time.sleep(0.2)
    batch = checked(raw_batches.retrieve(batch.id), Batch)
checked(raw_files.retrieve(batch.output_file_id), FileObject)
second = client.batches.create(input_file_id=file.id, endpoint=PATH, completion_window="10m")
cancelled = checked(raw_batches.cancel(second.id), Batch).status
while client.batches.retrieve(second.id).status == "cancelling" and time.monotonic() < deadline:
    time.sleep(0.2)
listed = [listed_batch.id for listed_batch in client.batches.list(limit=1, after=second.id)][:1]
files = [listed_file.id for listed_file in client.files.list(purpose="batch") if listed_file.id == file.id]
told = client.files.content(batch.output_file_id or "").text
row = json.loads(told)
print(
    json.dumps(
        {
            "version": openai.__version__,
            "status": batch.status,
            "counts": batch.request_counts.model_dump(),
            "listed": listed == [batch.id] and files == [file.id],
            "cancelled": cancelled in ("cancelling", "cancelled"),
            "text": row["response"]["body"]["choices"][0]["message"]["content"],
            "deleted": client.files.delete(file.id).deleted,
        }
    )
)
