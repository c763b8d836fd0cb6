"""The rules that every part schedules by: policies, deadlines, expected lengths and priority levels.

lengths.py        the expected length of a request's output
levels.py         priority levels by predicted or served steps, and expected waiting times (ALISE)
orders.py         the orders in which requests are served: one class per order, one table
policy.py         the policies of a deployment, and which of them go together
promise.py        what a request was promised: its dues and its place in the order
segmented_lru.py  the order in which idle pages of KV are evicted
sketch.py         a prompt as small integers, by which the length predictor compares prompts
slo.py            deadlines, slack and the order of service
"""
