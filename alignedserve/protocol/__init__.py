"""The messages between the parts of a deployment, and the events and commands between a shell and its core.

cancelled.py    Remembers which attempts were cancelled, for messages about them that arrive later.
commands.py     Orders of a core to its shell, in the imperative; they stay within one process.
events.py       Facts that a shell tells its core, in the past tense; which requests an event is about.
extents.py      The kinds of the pool's pages, and how its memory is divided among them.
figures.py      What parts report of themselves for metrics.
form_messages.py  The messages that only a form of KV needs.
form_orders.py  What a device is to do for a form before the next work.
int8_layout.py  The layout of a compressed page.
membership.py   What each peer may say, by its role, and what a process learns from frames: members, frames lost.
messages.py     The messages that parts send to each other.
page_names.py   Names of KV pages: hashes of their tokens and of all tokens before them.
rank_orders.py  What rank 0 of a worker orders the other ranks, and what they answer of transfers.
roads.py        How KV goes between two workers, by what they registered.
wire.py         Turn messages into msgpack frames and back, checked on both sides.
"""
