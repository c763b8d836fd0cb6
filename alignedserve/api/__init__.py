"""The Python API: a deployment and its model as objects, and simulated runs. `from alignedserve import LLM, simulate`.

parameters.py  what a caller may say of a request: sampling, deadlines
outputs.py     what comes back: whole outputs, and pieces of a stream
deployment.py  starts and ends `alignedserve serve`
started.py     the process that it starts, which ends with its parent
asking.py      HTTP requests, whole and streamed, some at a time
llm.py         LLM: prompts and conversations in, outputs out
simulating.py  simulates a run, or compares many
simulated_run.py  figures, tables, files of a run, and the story of each request
frames.py      tables as dataframes of pandas or polars, or as columns
"""
