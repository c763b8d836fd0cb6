"""The parts that the decode worker's core is made of.

making.py       How the parts of a decode worker are made, each with the parts that it works with.
stores.py       The state that the parts of a decode worker share.
intake.py       How candidates come to a decode worker: from the pool in a batch, or offered by a prefill worker.
joining.py      How candidates join the requests that decode: in their order, as soon as there is a seat and memory.
receiving.py    What becomes of KV that has come from a prefill worker's device, or should have.
prefetching.py  KV of candidates that prefill workers fetch from the pool ahead of need.
taking_in.py    Prompts that were run on a node without a pool: they are taken in for the pool of this node.
seats.py        The seats of a decode worker: waiting prompts get them, and what the pool has of those is fetched.
stepping.py     How a decode worker plans a step, and a step ahead of the one in flight.
step_ahead.py   Steps that are planned while the one before them runs.
own_choice.py   A custom policy chooses which seated requests run.
ending.py       What a step brings to requests: tokens, their end, or the loss of an attempt.
keeping.py      Prompts that are through, answers, and requests that leave next: the pool gets their full pages.
preempting.py   How a request that may be in a step leaves for lack of memory, by whatever rule it was chosen.
leaving.py      Requests that have to leave a decode worker, to a prefill worker that can send their KV back.
writing.py      What a decode worker writes to the pool: requests that have to leave, and answers.
asking.py       What a decode worker asks the pool for: requests that it has room for, and pages to have at hand.
reporting.py    What a decode worker tells the router about its load, and for the metrics about its steps.
"""
