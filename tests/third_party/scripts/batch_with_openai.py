"""A batch of one request by OpenAI's own client, of several majors: from the upload to the answer."""

from __future__ import annotations

import json
import sys
import time

import openai

url, model, question = sys.argv[1:]
client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
PATH = "/v1/chat/completions"

body = {"model": model, "temperature": 0, "messages": [{"role": "user", "content": question}]}
line = {"custom_id": "a", "method": "POST", "url": PATH, "body": body}
file = client.files.create(file=("x.jsonl", json.dumps(line).encode()), purpose="batch")
batch = client.batches.create(input_file_id=file.id, endpoint=PATH, completion_window="24h")
deadline = time.monotonic() + 60
while batch.status in ("validating", "in_progress", "finalizing") and time.monotonic() < deadline:
    time.sleep(0.2)
    batch = client.batches.retrieve(batch.id)
listed = [one.id for one in client.batches.list(limit=1)][:1]
told = client.files.content(batch.output_file_id or "").text
row = json.loads(told)
print(
    json.dumps(
        {
            "version": openai.__version__,
            "status": batch.status,
            "counts": batch.request_counts.model_dump(),
            "listed": listed == [batch.id],
            "text": row["response"]["body"]["choices"][0]["message"]["content"],
            "deleted": client.files.delete(file.id).deleted,
        }
    )
)
