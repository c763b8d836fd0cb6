"""Schedulers: objects that plan the steps of a worker.

aligned.py      The default: chats in time, documents in all that chats leave. Begin here.
near_lengths.py Which decodes of documents share a step (AlignedServe §3.3).
table.py        Which scheduler a policy means.
"""
