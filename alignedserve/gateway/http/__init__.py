"""HTTP below the interface: connections, bodies, limits, metrics.

bodies.py       Bodies of requests: how large each may be, how long it may take, how much of all of them is
connections.py  Connections of clients that are slow, greedy, broken or gone: each costs little, and not for long.
limits.py       How much each caller may have: requests and tokens in a minute, requests open at once.
metrics.py      What Prometheus is told, under the names that vLLM's users know, and what the log is told of
middleware.py   Around every request: its id, its key, its line in the log, and an answer whatever happens.
refusing.py     Errors as answers over HTTP.
siblings.py     The metrics of all gateways of a deployment, whichever of them is asked: they are behind one
uploading.py    A multipart form with a file in it, read as it comes: the file goes to disk and is never in
"""
