"""The prefill worker: it runs prompts and holds the candidate batch for decode workers.

actor.py       The prefill worker as a process.
buffering.py   What a prefill worker holds for decode workers: KV of their candidates, prefetched from the
candidates.py  Requests whose KV lies here until a decode worker pulls it: they are handed on without waiting
offering.py    What a prefill worker does with a prompt that is through: it is offered to a decode worker, or
prefixes.py    Prompts that begin as others did: what the pool still has of their beginning is not computed again.
state.py       The prefill worker's core: runs prompts, emits their first tokens, commits their KV to the pool.
"""
