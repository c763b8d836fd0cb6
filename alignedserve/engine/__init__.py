"""The engine: it runs one StepPlan on a device and decides nothing.

engine.py     The engine: owns the weights and the device cache, and executes step plans.
graphs.py     Decode steps of some sizes, captured once each and then replayed: the host launches one graph,
in_order.py   A worker's work in a thread of its own, in its order: while a step runs, its core hears what
inputs.py     What goes into a step: tokens that the plan names, and ones that the step before it has sampled
profiling.py  Measures steps of a real engine at start-up, so that the cost model knows the device before the
"""
