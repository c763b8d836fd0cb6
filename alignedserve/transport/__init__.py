"""How KV travels from device to device.

channel.py    One direction between two workers: its transfers one after the other, in a thread of its own.
choice.py     Which transport a worker uses, and why: of what is asked for, and of what is there.
direct.py     KV goes from device to device: a two-rank group of torch.distributed for each direction between
frames.py     What the two ends of a transfer say to each other before its payload, within it and after it.
ipc.py        The transport `ipc`: workers on one machine map each other's device cache, and the receiver
mapping.py    A worker's device cache as another process of the machine sees it.
meeting.py    How the two ends of a channel agree on their next group.
opening.py    Opens the transport of a worker as it starts.
payload.py    A request's KV, or its hidden vectors, between the blocks of a device cache and the chunks that
receiving.py  The receiver's end of a channel.
sending.py    The source's end of a channel.
together.py   Transfers of a worker with several ranks: each sends its part of the KV to the same rank of the
transport.py  What a worker's hands ask of a transport.
"""
