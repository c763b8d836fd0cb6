"""The HTTP gateway.

actor.py       The gateway as a process: HTTP on its event loop, the owner of its requests in a thread beside.
app.py         The HTTP application: OpenAI's routes over an owner of requests.
batches.py     /v1/batches: jobs are submitted, looked at and cancelled here; the job runner does the rest.
files.py       /v1/files: what batch jobs read and write, of each key its own.
generation.py  The requests of one body, from their owner to its client: as tokens of any of them are
openapi.py     Our own OpenAPI document: every route, what it takes and what it answers.
sse.py         Answers as server-sent events.
streaming.py   Answers on their way to a client that may leave at any time.
tokenising.py  Prompts as tokens and back, as vLLM's `/tokenize` and `/detokenize` have them.
"""
