"""The HTTP gateway: OpenAI's interface to clients, in front of the requests that it owns.

actor.py       Runs the gateway as a process: HTTP on an event loop, the owner of its requests in a thread.
app.py         The HTTP application: OpenAI's routes in front of an owner of requests.
batches.py     The routes of /v1/batches, where clients submit, watch and cancel jobs.
files.py       The routes of /v1/files: the files that batch jobs read and write.
generation.py  Runs the requests of one body and reads their tokens as they are delivered.
openapi.py     Our own OpenAPI document: every route with its parameters, body and answers.
settings.py    The settings of a gateway's HTTP application.
streaming.py   Sends answers to clients that may leave at any time.
tokenising.py  Converts prompts to tokens and back: /tokenize and /detokenize.
"""
