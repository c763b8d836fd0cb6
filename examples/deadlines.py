"""Promise a chat its times, and send a document that nobody waits for: both to one server, at once."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("URL", "http://127.0.0.1:8000") + "/v1", api_key="none")
MESSAGES = [{"role": "user", "content": "Count from 3 to 12."}]


def ask(name: str, **how: object) -> str:
    began, model = time.monotonic(), client.models.list().data[0].id
    stream = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=40, stream=True, **how)
    times = [time.monotonic() - began for event in stream if event.choices and event.choices[0].delta.content]
    return f"{name}: first token after {times[0]:.2f} s, the last after {times[-1]:.2f} s"


with ThreadPoolExecutor() as pool:
    document = pool.submit(ask, "document", service_tier="flex")
    print(ask("chat", extra_body={"slo": {"ttft_ms": 500, "tbt_ms": 100}}), document.result(), sep="\n")
