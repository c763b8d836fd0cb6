"""The records of a simulated run.

distribution.py  Summarises many values in a few numbers, for every figure and plot.
record_file.py   Writes a run's whole record to a JSON file, and reads it.
records.py       Defines the records of requests, steps, copies and runs.
"""
