"""Runs prompts, emits their first tokens, and hands their KV on.

state.py      The prefill worker's core: the decode worker's, where nothing decodes.
buffering.py  KV that is held for decode workers, and the KV that they pull.
actor.py      The worker's process.
"""
