"""Simulated machines: processes, the network, faults, engines and hardware.

clock.py      Virtual time, and what happens in it: one total order, (time, priority, serial), written here
engine.py     The modelled engine: how long its work takes, what it says, and KV that is right or noticed.
faults.py     What goes wrong, and when: drawn from a seed, or written down by hand.
gpu_truth.py  What a step takes on a real GPU: measured grids, interpolated. The simulator's truth, apart from
hardware.py   What a simulated worker is made of: how long its steps and copies take, and how much memory it has.
process.py    One life of a member, done virtually.
transfers.py  KV from one worker's device to another's, done virtually.
trouble.py    What is wrong at the moment with links, clocks and machines, in a world that asks before it acts.
world.py      The processes and the links between them, done virtually: who is alive, what is under way, what
"""
