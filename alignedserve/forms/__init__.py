"""Other forms than KV in separate blocks on a device, or than plain KV in the pool's pages. Each is an experiment.

    rules       what a form needs of the other settings, and forbids   (schedule.blocks, .cache, kvpool.compression)
    memory/     which requests have which memory, in which form        a decode worker's core makes one
    pool/       the pool's pages of waiting requests as int8           the pool's core makes one, and each worker a part
    orders      what the device does for a form between two steps      performed in turn with a worker's other work
    prefetch/   KV that prefill workers hold for decode workers        each worker's core has a part (parts/)
    device/     how an engine keeps a form, and attends to it          a worker's engine makes one

Other code knows only the interfaces of forms: `PlainMemory` for memory, `Pages` and `Rewriting` for the pool's pages,
`FormOrder` for orders, and the `KvForm` of a request or the `PageKind` of a page. Each form's page says what it gains:
docs/how/papers.md.

messages.py  The messages that only a form needs.
orders.py    What a device is to do for a form before the next work.
rules.py     The options of a policy that turn forms on, and what they forbid and mean.
"""
