"""Runs prompts, emits their first tokens, and hands their KV on.

state.py            The prefill worker's core: which part hears which event, and the acts of its turn.
running_prompts.py  Prompts that have block pairs and are not through.
next_step.py        The next step: which prompts get seats, and which chunks run.
handing_on.py       Prompts that are through: offered to decode workers, or committed to the pool.
pool_writing.py     What the worker writes to the pool, and the pages that it asks for.
buffering.py        KV that is held for decode workers, and the KV that they pull.
actor.py            The worker's process.
"""
