"""What users ask to be simulated, by the command line or from Python, and how it is built and run.

building.py  turns what users ask for (preset, workload, cluster, profile, policy) into the settings of a run
crowd.py     runs people who ask at once, alone and beside documents
running.py   runs a trial: alone, with a film for a page, or with every command written to a file
"""
