"""Measurements that back our claims: `python -m lab.benchmarks.NAME`. Each prints a JSON line for a figure.

Kernels and the engine
    accuracy.py         how far next tokens of a published model are from fp32's, in each form, on each instruction set
    alignment.py        the cost of few long prefixes in a batch of short prefixes, on each attention kernel
    attention.py        attention against the memory's bandwidth and torch's SDPA
    copies.py           copying and compressing pages against memcpy
    embeddings.py       vectors of texts against sentence-transformers
    engine.py           the engine on a CPU against transformers and vLLM
    families.py         modules of our own against transformers' of the same models
    gpu.py              the engine on a GPU
    gpu_ceilings.py     what a GPU can do, and how near attention comes to it
    gpu_quantised.py    the same with quantised weights, against bf16
    gpu_server.py       a whole deployment on one GPU
    joins.py            what a join of a long request costs those that decode meanwhile, between steps and beside them
    linear.py           linear layers against the memory's bandwidth and torch
    lora.py             what adapters add to a step
    quantised_files.py  the engine on quantised files against llama.cpp and vLLM
    loading.py          seconds and memory until a model is loaded
    sliding_windows.py  what a long context holds where all layers have a window, and decodes at once
    transfer.py         KV from one device to another, and how much it slows steps meanwhile
Single cores and processes
    cost.py             how well the cost model predicts steps
    decode_plan.py      the time to plan a step on a decode worker
    gateway.py          the time that the gateway adds to a request and to a token
    hostile.py          what hostile bodies, floods, poison, hung steps, lost logs and locks cost a deployment
    load_client.py      what the client of `alignedserve bench` costs, and whether it agrees with vLLM's
    kvpool.py           the pool's index and the batches that it finds
    router.py           requests that the router admits and places per second; the time of a frame
    scrape.py           one scrape of the metrics of 16 workers
    selection.py        the time to choose a step on a prefill worker
Deployments, real or simulated
    batch_files.py      large and odd files of batches over HTTP
    endurance.py        whether memory, descriptors and latencies stay as they are for hours
    isolation.py        chats beside best-effort documents
    packing.py          presets on workers that are short of memory
    processes.py        memory of an idle deployment, and the time until it is ready
    router_restart.py   the router killed under load
    turns.py            chats of turns and prompts that begin alike against vLLM's server; memory for half of a load
    windows.py          batch jobs with windows beside chats
The simulator and what it compares
    grouping.py         grouping by length against first come, first served
    predictor.py        how well lengths are predicted, and the gain
    presets.py          `aligned` against every other preset
    promises.py         promises kept over capacity and below it, beside documents, on few and many workers
    roofline.py         computed GPUs against measured GPUs
    self_simulation.py  this machine's engine against the simulation of it
    simulator.py        how fast the simulator is, and how near to vLLM

    common/             code that several benchmarks use
    peers/              vLLM, as a peer
    data/               a trace of chats, and texts
    results/            the printed figures, by day and machine
"""
