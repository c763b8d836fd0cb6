"""The owner of requests: it keeps the only lasting copy of each open request.

arrivals.py  What comes in the owner's thread, to those who wait for it on the event loop.
client.py    What the HTTP application and the job runner need of the owner of its requests.
core.py      The owner's core: the one lasting copy of each open request, in the gateway that accepted it.
shell.py     The owner of requests as both the gateway and the job runner have it: its core in a thread,
"""
