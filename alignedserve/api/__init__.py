"""The Python API: a deployment and its model as objects. `from alignedserve import LLM`.

outputs.py     what comes back: whole outputs, and pieces of a stream
deployment.py  starts and ends `alignedserve serve`
started.py     the process that it starts, which ends with its parent
asking.py      HTTP requests, whole and streamed, some at a time
llm.py         LLM: prompts and conversations in, outputs out
"""
