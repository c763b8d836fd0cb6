"""The code that prefill workers and decode workers share. Their cores are made of parts (parts/).

setup.py        What a worker's core is made with, and how it takes a request in.
device.py       The block pairs of a device as the parts share them, and whether waiting prompts may be seated.
dropping.py     Frees KV that no layer reads any more, of requests that still run.
pace.py         How fast a worker is: the time of steps, the size of chunks, the tokens that a step may have.
in_flight.py    The steps that a worker has ordered and not heard the end of: one, or two where one is planned ahead.
outputs.py      What a worker has emitted: sent to the owners once a step, kept until they have it.
notes.py        What a worker has to tell the router: which requests have moved on, how long outputs were, faults.
counts.py       What a worker counts for metrics: steps, requests that had to leave them, predictions that came out.
page_writer.py  What a worker writes to the pool: the pages that it has leased, the copies to them.
leases.py       Pages of the pool that a worker may write to, for requests of one class, and its asks for them.
"""
