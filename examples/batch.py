"""Run a batch job with OpenAI's client: each line of the file is answered once, in what chats leave."""

import json
import os
import time

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("URL", "http://127.0.0.1:8000") + "/v1", api_key="none")
asked = {"model": client.models.list().data[0].id, "max_tokens": 4}
line = {"method": "POST", "url": "/v1/completions"}
lines = [{**line, "custom_id": f"sum-{n}", "body": {**asked, "prompt": f"{n} + 4 ="}} for n in range(8)]
file = client.files.create(file=("sums.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
job = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
while (job := client.batches.retrieve(job.id)).status in ("validating", "in_progress", "finalizing"):
    time.sleep(0.5)
for row in map(json.loads, client.files.content(job.output_file_id).text.splitlines()):
    print(row["custom_id"], row["response"]["body"]["choices"][0]["text"])
