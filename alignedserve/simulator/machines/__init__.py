"""Simulated machines: processes, the network, faults, engines and hardware.

clock.py      Keeps virtual time and orders events: (time, priority, serial).
engine.py     Models an engine: how long its work takes, its tokens, and KV that is checked.
faults.py     Defines faults, and draws them from a seed.
gpu_truth.py  Says how long a step takes on a real GPU, from measured grids.
hardware.py   Says how long a worker's steps and copies take, and how much memory it has.
process.py    One life of a member, done virtually.
transfers.py  Transfers KV from one device to another in virtual time.
trouble.py    Keeps the faults that are in force on links, clocks and machines.
world.py      Keeps the simulated processes and the links between them.
"""
