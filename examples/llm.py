"""Ask a model from Python, without a server of your own: LLM starts one, unless URL names one that runs."""

import os

from alignedserve import LLM, SamplingParams

url = os.environ.get("URL")
with LLM(url=url) if url else LLM("smollm2") as llm:
    questions = ["What is the capital of France?", "Name three planets."]
    chats = [[{"role": "user", "content": question}] for question in questions]
    for question, answer in zip(questions, llm.chat(chats, SamplingParams(temperature=0, max_tokens=40)), strict=True):
        print(f"{question} {answer.outputs[0].text}")
