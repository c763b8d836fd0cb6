"""What several benchmarks use, and the parts of the large ones.

batches.py       a client of files and batches
chats.py         chats beside documents, with two backends: a deployment over HTTP, and the simulator
crowd.py         processes that compute beside what is measured
divergence.py    how far logits are from those of the same weights in fp32, on a text
faults.py        poison, hangs, killed launchers, logs, locks and small memory, as rows of lab.benchmarks.hostile
family_models.py random models of families that transformers could run too
gpu_shapes.py    the command line of a GPU's benchmarks, their models, and how work on a GPU is timed
hog.py           a tenant that takes half of the memory bandwidth, real and simulated
machines.py      workers whose steps were measured, as profiles for the simulator
mixed_load.py    all kinds of clients at once
models.py        random weights of usual sizes
one_pass.py      a model as the engine runs it, for all logits of a text in one pass
report.py        command lines and JSON lines
serving.py       deployments: started, asked for a stream of tokens, and their processes
simulating.py    simulated runs, where each must end without a problem
slopes.py        whether a figure grows with time
vllm_steps.py    steps of vLLM's engine, in a Python of its own
"""
