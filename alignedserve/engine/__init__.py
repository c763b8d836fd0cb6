"""The engine: it runs one StepPlan on a device and decides nothing.

calibration.py What a model says before its weights are quantised, by which they are, and how far it is then.
engine.py     The engine: owns the weights and the device cache, and executes step plans.
graphs.py     Captures steps as graphs, one for each of some sizes, and replays them.
in_order.py   Runs a worker's steps and other work in one thread, in order, and reads results in another.
inputs.py     The input tokens of a step: named by the plan, or sampled by the step before and not yet read.
pooling.py    Makes the vectors that requests ask for from the states of tokens.
profiling.py  Measures steps of a real engine at start-up, so that the cost model knows the device.
"""
