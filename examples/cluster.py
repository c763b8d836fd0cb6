"""Two prompt workers and two decode workers on a Ray cluster: RAY_ADDRESS=auto in it, else one of its own here."""

import os

import httpx

from alignedserve import LLM, Deployment, SamplingParams

launcher = os.environ.get("LAUNCHER", "ray")  # local: as processes, without Ray
where = {"ray_address": os.environ["RAY_ADDRESS"]} if "RAY_ADDRESS" in os.environ else {}
with Deployment(os.environ.get("MODEL", "smollm2"), topology="2+2", launcher=launcher, **where) as deployment:
    for part in httpx.get(f"{deployment.url}/status").json()["parts"]:
        print(f"{part['name']} on {part['node']}")
    (answer,) = LLM(url=deployment.url).generate("3 + 4 =", SamplingParams(temperature=0, max_tokens=4))
    print(answer.outputs[0].text)
