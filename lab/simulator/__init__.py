"""The simulator: runs the same cores under a virtual clock, with a modelled engine.

clients.py     Sends requests, and checks that all own tokens come once, and then the end.
job_runner.py  Runs the real job runner in a simulated deployment, with faults.
job_users.py   Submits batch jobs to a store with faults, cancels some, and checks their results.
launching.py   Starts and stops workers, as the launcher of a real deployment does.
recorder.py    Records steps and copies while a simulation runs.
run.py         Runs a workload through a whole deployment in virtual time: `Simulation(settings).run()`.
settings.py    Describes a simulated deployment, its workload and its faults.
"""
