"""What several benchmarks use, and the parts of the large ones.

gpu_shapes.py    the command line of a GPU's benchmarks, their models, and how work on a GPU is timed
chat_loads.py    loads of chats, at the rate that two workers take
columns.py       the columns of every table of simulated loads
machines.py      workers whose steps were measured, as profiles for the simulator
mixed_load.py    all kinds of clients at once
models.py        random weights of usual sizes
one_pass.py      a model as the engine runs it: all logits of a text in one pass, and how far these are from others
openvino_server.py  a server around OpenVINO GenAI, in a Python of its own
peers.py         servers of others: vLLM, llama.cpp, OpenVINO GenAI
report.py        command lines and JSON lines
serving.py       deployments: started, loads that are played on them, and their processes
shifts.py        whether figures moved beyond the seeds' spread, and what a rule is worth
simulating.py    simulated runs, where each must end without a problem
vllm_steps.py    steps of vLLM's engine, in a Python of its own
"""
