"""HTTP below OpenAI's interface: connections, bodies, limits, log lines.

bodies.py           Reads bodies within limits of size, time and memory; callers take turns at what they cost.
connections.py      Limits what connections cost whose clients are slow, greedy, broken or gone.
error_responses.py  Turns errors into HTTP answers.
handover.py         Hands the listening socket to the gateway that replaces this one.
limits.py           Holds each caller to its limits: requests, tokens and looks in a minute, requests open at once.
middleware.py       Gives every HTTP request its id, its caller and its log line, and answers it always.
origins.py          Refuses what a web page must not do with a server that asks for no key.
records.py          Follows a request: log line, times, and the meters of what the body asks for.
scraping.py         The text of /metrics, which scrapes share.
uploading.py        Reads a multipart form with a file as it arrives.
"""
