"""The simulator: the same cores under a virtual clock, with a modelled engine.

batch_jobs.py  Batch jobs in a simulated deployment: the job runner's own core asks for their lines beside a
clients.py     Who asks in a simulation, and whether each gets what is its own: every token, once, and an end.
launching.py   The launcher of a simulated deployment: workers come and go as `alignedserve scale`, or the
predicting.py  The length predictor of a simulated deployment: the same commands by the same code as in the
recorder.py    What the simulation notes while it runs, if it is asked to: as little as the figures need.
run.py         `simulate(settings) -> Summary`: a workload through a whole deployment, in virtual time.
settings.py    What is simulated: a deployment, what is asked of it, and what befalls it.
"""
