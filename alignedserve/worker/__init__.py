"""What prefill workers and decode workers have in common.

compressing.py  What a worker has to compress for the pool: one order at a time, a page after the other.
core.py         What the cores of both workers have in common: pairs, steps, outputs, and their word to the
in_flight.py    The steps that a worker has ordered and not heard the end of: one, or two where one is planned
leases.py       Pages of the pool that a worker may write to, for requests of one class, and its asks for them.
notes.py        What a worker has to tell the router: which requests have moved on, how long outputs were,
outputs.py      What a worker has emitted: sent to the owners once a step, kept until they have it.
page_writer.py  What a worker writes to the pool: the pages that it has leased, the copies to them, and their
step_room.py    How many tokens a step may have: fewer after one that found too little memory, then more
"""
