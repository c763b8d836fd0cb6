"""Measurements that back our claims: `python -m lab.benchmarks.NAME`. Each prints a JSON line for a figure.

Kernels and the engine
    accuracy.py         how far next tokens of a published model are from fp32's, in each form, on each instruction set
    engine.py           the engine on a CPU against transformers, vLLM and llama.cpp; its forms against each other
    gpu.py              the engine on a GPU
    gpu_ceilings.py     what a GPU can do, and how near attention comes to it
    gpu_server.py       a whole deployment on one GPU
    served.py           what a served step costs beside the engine's own time
Single cores and processes
    cost.py             how well the cost model predicts steps
    floods.py           another key's chats beside floods, simulated
    gateway.py          the time that the gateway adds to a request and to a token
    hostile.py          what hostile bodies, floods and lost launchers cost a deployment, and others' chats
Deployments, real or simulated
    charged.py          whether requests are charged for what workers used, and what that costs
    crowd.py            many people at once, by the openai client's defaults, beside llama.cpp's server
    endurance.py        whether memory, descriptors and latencies stay as they are for hours
    isolation.py        chats beside best-effort documents
The simulator and what it compares
    figures.py          published figures, traces and the mixes of rules.py against the values in figures.jsonl
    promised.py         whether people who ask at once get what `alignedserve promise` says
    rules.py            what each rule of the default scheduler is worth
    simulator.py        how fast the simulator is, and how near to real runs

    common/             code that several benchmarks use
    data/               a trace of chats, and texts
    results/            the printed figures, by day and machine
"""
