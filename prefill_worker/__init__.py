"""Runs prompts, emits their first tokens, and hands their KV on.

state.py       The prefill worker's core: which part hears which event, and the acts of its turn.
running.py     Prompts that run: the next step, and what a step that has ended brings.
handing_on.py  Prompts that are through: committed to the pool, or offered to decode workers.
buffering.py   KV that is held for decode workers, and the KV that they pull.
actor.py       The worker's process.
"""
