"""Rules that every part schedules by: policies, deadlines, predicted lengths, priority levels.

expected_wait.py  The expected waiting time of requests that wait in line (ALISE §3.2).
lengths.py        How long a request's output is taken to be: what was predicted, within what the request says
levels.py         Levels of requests: the fewer steps are predicted to be left, or the fewer were served, the
orders.py         The orders in which requests are served wherever some have to wait: one class per order.
policy.py         How a deployment schedules: the same in every part, on real workers and in the simulator.
promise.py        What a request was promised, as the part reckons with it that has the request: its dues, its
sketch.py         A prompt as a few hundred small integers: what the length predictor compares prompts by
slo.py            Deadlines: when the next token is due, how much time is left until then, and who goes first.
"""
