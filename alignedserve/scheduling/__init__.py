"""The rules that every part schedules by: policies, deadlines, expected lengths and priority levels.

dues.py           what a request is promised, by its class: dues, slack, place in the order
form_rules.py     the options of a policy that turn forms on, and what they forbid and mean
lengths.py        the expected length of a request's output
levels.py         priority levels by predicted steps, and expected waiting times (ALISE)
offered.py        schedulers that are found by name: of the papers, and of installed packages
orders.py         the orders in which requests are served: one class per order
parts.py          parts of what several callers want, by their weights
policy.py         the policies of a deployment, and which of them go together
segmented_lru.py  the order in which idle pages of KV are evicted
sketch.py         a prompt as a few numbers, by which similar prompts are found
slo.py            the order of service by slack, and the time of steps
"""
