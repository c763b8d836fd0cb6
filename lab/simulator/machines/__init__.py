"""Simulated machines: processes, the network, faults and engines.

clock.py          Keeps virtual time and orders events: (time, priority, serial).
engine.py         Models an engine: how long its work takes, which tokens it samples, and KV that it checks.
event_loop.py     An event loop of asyncio in virtual time, for shells that run on one.
fault_drawing.py  Draws faults from a seed.
faults.py         Defines faults.
forging.py        Makes frames that no part may say.
process.py        Runs one life of a member in virtual time.
transfers.py      Transfers KV from device to device in virtual time.
trouble.py        Keeps the faults that links, clocks and machines have at the moment.
world.py          Keeps the simulated processes and the links between them.
"""
