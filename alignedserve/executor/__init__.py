"""How a worker's process performs the commands of its core on the engine.

hands.py    What a worker's shell does for its core: steps on the engine, copies between device and arena.
leading.py  Rank 0 of a worker that several ranks share: it says what it does before it does it, and the
loading.py  A worker's engine: threads, device, the device cache, captured steps.
"""
