"""Simulate questions before you own the device: which schedule keeps promises on an RTX 4090, to which load?"""

from alignedserve import compare, simulate

DEVICE, LOAD = "rtx4090-llama-3.1-8b-tp1", "coserve,documents.in_flight=8,first_s=5"

run = simulate(f"{LOAD},chat.rate=4", profile=DEVICE)
print(f"{run.summary.rt.attainment:.1%} of the chats in time, P99 of the first token {run.summary.rt.ttft_s.p99:.2f} s")
run.page("run.html")  # the live page of this run, with a slider of its time
print(compare(["aligned", "vllm-chunked"], LOAD, profile=DEVICE, seeds=[0], rates=[2, 8]))
