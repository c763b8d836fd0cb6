"""The transports by which KV travels from device to device.

channel.py    one direction between two workers, and its transfers one after the other
direct.py     transfers over groups, or from mapped memory
ends.py       the source's and the receiver's end of a channel
frames.py     the frames of a transfer
ipc.py        both ends of a transfer from mapped memory
joining.py    how two processes connect, and prove to each other who they are; how the ranks of a worker meet
mailbox.py    where other workers leave notes for a worker, by the deployment's keys
mapping.py    device caches that other processes map
meeting.py    how two workers agree on their next group
opening.py    opens the transport of a worker when it starts
payload.py    a request's vectors between device blocks and chunks
together.py   transfers of a worker with several ranks
transport.py  the interface of a transport, and the transport `host`
turns.py      one communicator for a pair, and one transfer at a time on a GPU
"""
