"""What the parts of a deployment say to each other, and what a shell and its core say to each other.

commands.py     What a core has its shell do: orders, in the imperative. They stay within one process.
events.py       What a shell tells its core: facts, in the past tense. They stay within one process.
membership.py   What a process derives from the frames that reach it: who came and went, and which frames did
messages.py     What the parts say to each other.
page_names.py   Names of KV pages: a page is named by a hash of its tokens and of all tokens before them.
rank_orders.py  What rank 0 of a worker tells the others, for what it does on its device and in its arena,
wire.py         Turn messages into msgpack frames and back, checked on both sides.
"""
