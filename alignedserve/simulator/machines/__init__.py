"""Simulated machines: processes, the network, faults, engines and hardware.

clock.py       Keeps virtual time and orders events: (time, priority, serial).
device_file.py Reads what users write of a device: its numbers, or grids that they measured.
devices.py     Keeps the sizes and speeds of GPUs and models, and their names.
engine.py      Models an engine: how long its work takes, which tokens it samples, and KV that it checks.
event_loop.py  An event loop of asyncio in virtual time, for shells that run on one.
faults.py      Defines faults, and draws them from a seed.
forging.py     Makes frames that no part may say.
gpu_truth.py   Computes from grids how long a step takes on a GPU.
hardware.py    Describes a worker's device: how long steps and copies take, and how much memory it has.
process.py     Runs one life of a member in virtual time.
roofline.py    Computes grids for GPUs that nobody measured, from data sheets.
transfers.py   Transfers KV from device to device in virtual time.
trouble.py     Keeps the faults that links, clocks and machines have at the moment.
world.py       Keeps the simulated processes and the links between them.
"""
