"""Simulated runs from Python: `from alignedserve import simulate, compare`.

simulating.py     simulates a run, or compares many
simulated_run.py  figures, tables, files of a run, and the story of each request
"""
