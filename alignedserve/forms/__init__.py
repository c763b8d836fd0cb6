"""KV elsewhere than in a worker's own blocks, or in another form in the pool's pages. Each is an experiment.

    pool/       a worker's part of pages of the pool as int8           each worker's core has one
    prefetch/   KV that prefill workers hold for decode workers        each worker's core has a part (parts/)

Other code knows only the interfaces of forms: `PlainMemory` for memory (papers/memory/ has others), `Pages` and
`Rewriting` for the pool's pages, `FormOrder` for orders, and the `KvForm` of a request or the `PageKind` of a page.
Each form's page says what it gains: docs/how/papers.md.

What others know of forms stands with them: scheduling/form_rules.py (options, and what they forbid), engine/forms/ (how
an engine keeps a form), kvpool/memory/ (compression), protocol/form_messages.py and form_orders.py.
"""
