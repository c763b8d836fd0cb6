"""KV elsewhere than in a worker's own blocks, or in another form in the pool's pages. Each is an experiment.

    page_rewriting.py   a worker's part of pages of the pool as int8: each worker's core has one
    prefetching.py      a decode worker's part of KV that prefill workers hold for it, copied there ahead of need
                        (AlignedServe §3.2 and §3.4), and requests that leave for prefill workers
    buffers.py          the prefill worker's part: the held KV, and how decode workers pull it
    table.py            which of these, and which memory, a policy adds to a worker's core

Other code knows only the interfaces of forms: `PlainMemory` for memory (papers/memory/ has others), `Pages` and
`Rewriting` for the pool's pages, `FormOrder` for orders, and the `KvForm` of a request or the `PageKind` of a page.
Each form's page says what it gains: docs/how/papers.md.

What others know of forms stands with them: scheduling/form_rules.py (options, and what they forbid), engine/forms/ (how
an engine keeps a form), kvpool/memory/ (compression), protocol/form_messages.py and form_orders.py.
"""
