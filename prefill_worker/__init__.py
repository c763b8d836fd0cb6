"""Runs prompts, emits their first tokens, and hands their KV on. A core is made of parts (alignedserve/worker/parts/).

state.py            The prefill worker's core: its parts and its turn.
known_pages.py      Pages that the pool keeps for prompts of this worker, and their release.
running_prompts.py  Prompts that have block pairs and are not through.
next_step.py        The next step: which prompts get seats, and which chunks run.
offering.py         Prompts that are through are offered to decode workers.
candidates.py       The prompts that are offered, and the decode workers that KV can be sent to.
committing.py       Prompts that go to the pool: they wait for pages, are copied, and are committed.
pool_writing.py     What the worker writes to the pool, and the pages that it asks for.
buffering.py        KV that is held for decode workers: prefetched from the pool, or evicted from their devices.
decode_peers.py     The decode workers that KV can be sent to, and the KV that they pull.
actor.py            The worker's process.
"""
