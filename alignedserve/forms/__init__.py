"""Forms other than KV in blocks of its own, and than pages of KV in the pool: each is an experiment.

    rules       what a form needs of the other settings, and forbids   (schedule.blocks, .cache, kvpool.compression)
    memory/     which requests have which memory, in which form        a decode worker's core makes one
    pool/       the pool's pages of waiting requests as int8           the pool's core makes one, and each worker a part
    orders      what the device does for that between two steps    as other work of a worker, in its turn
    prefetch/   KV that prefill workers hold for decode workers        each worker's core has a part (parts/)
    device/     how an engine does it, and attends to what it has so   a worker's engine makes one

What runs beside the forms knows their interfaces alone: memory as `PlainMemory` tells it, the pool's pages as `Pages`
and `Rewriting` do, orders as `FormOrder`, a form as the `KvForm` of a request or the `PageKind` of a page. Each form's
page says what it brings: docs/how/blocks.md, docs/how/hybrid_cache.md, docs/how/kvpool.md, docs/how/batches.md.

orders.py  What a device is to do for a form before the next work.
rules.py   The settings that turn forms on, and what they need of others.
"""
