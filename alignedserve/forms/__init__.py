"""Forms in which a device may keep a request other than as KV in block pairs of its own: each is an experiment.

    rules       what a form needs of the other settings, and forbids          (schedule.blocks, schedule.cache)
    memory/     which requests have which memory, in which form               a decode worker's core makes one
    orders      what the device is to do for that between two steps            as other work of a worker, in its turn
    device/     how an engine does it, and attends to what it has so kept      a worker's engine makes one

What runs beside the forms knows their interfaces alone: memory as `PlainMemory` tells it, orders as `FormOrder`, a form
as the `KvForm` of a request. Each form's page says what it brings: docs/how/blocks.md, docs/how/hybrid_cache.md.

orders.py  What a device is to do for a form before the next work.
rules.py   The settings that turn forms on, and what they need of others.
"""
