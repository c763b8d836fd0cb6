"""The decode worker: it decodes batches of requests, real-time and best-effort.

state.py  The decode worker's core: fetches batches from the pool and decodes them; colocated, it runs prompts too.
actor.py  The decode worker as a process.

The core is made of parts (parts/). They share stores of the requests that are here (requests/), a memory, which says
what requests may take of the device (memory/), and a scheduler, which plans their steps
(alignedserve/schedulers/).
"""
