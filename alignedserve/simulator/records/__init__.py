"""What a simulated run records.

distribution.py  Many values as a few numbers: one definition of each, for every figure and every plot.
record_file.py   The whole record of a run as a JSON file, so that it can be looked at again without being
records.py       What happened in a run: written by the simulation while it runs, read by figures, tables,
step_log.py      All steps of a run, packed: a long run has millions of them, and an object for each would
"""
