"""The HTTP gateway: OpenAI's interface to clients, in front of the requests that it owns.

actor.py       Runs the gateway as a process: HTTP on an event loop, the owner of its requests in a thread.
app.py         The HTTP application: OpenAI's routes in front of an owner of requests.
batches.py     The routes of /v1/batches, where clients submit, watch and cancel jobs.
dashboard.py   The live page: its routes, and the pictures that it is sent, one each second.
embed_side.py  The embedding model beside the served one, and the owner of requests for it.
embedding.py   The routes of vectors: /v1/embeddings, /v1/score and /v1/rerank.
explaining.py  The route of a request's timeline.
files.py       The routes of /v1/files: the files that batch jobs read and write.
exchanges.py   Answers a body while its client waits: as a stream of events, or whole.
generation.py  Runs the requests of one body and reads tokens as they are delivered.
llama_cpp.py   The routes of llama.cpp's server that editors use: /infill and /completion.
messages.py    Anthropic's Messages API: bodies, the chats made of these, routes and answers.
openapi.py     Our own OpenAPI document: every route (routes.yaml) with its parameters, body and answers.
pages.py       Small pages for browsers: / and /docs.
responding.py  The routes of /v1/responses, whose conversations the server may keep.
settings.py    The settings of a gateway's HTTP application.
starting.py    Starts the requests of a body.
vectors.py     The bodies that ask for vectors, with requests and answers.
"""
