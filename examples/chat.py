"""Chat with a server, with OpenAI's client: `pip install openai`, `alignedserve serve` first; URL names another one."""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("URL", "http://127.0.0.1:8000") + "/v1", api_key="none")
model = client.models.list().data[0].id
turns = []
for question in ("Count from 3 to 6.", "Count from 7 to 9."):
    turns.append({"role": "user", "content": question})
    answer = ""
    for event in client.chat.completions.create(model=model, messages=turns, max_tokens=60, stream=True):
        answer += (piece := event.choices[0].delta.content or "")
        print(piece, end="", flush=True)
    turns.append({"role": "assistant", "content": answer})
    print()
