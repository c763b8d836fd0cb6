"""The decode worker: it decodes batches of requests, real-time and best-effort.

state.py         The decode worker's core: which part hears which event, and what follows each event.
arriving.py      Requests that come: batches of the pool, offers, the room for more.
choices.py       The choices of one prompt, which get their first tokens with the first choice.
joining.py       Requests that get seats: candidates, copied or pulled, and prompts.
running.py       The next step: memory, the choice, a step ahead or in a pause, and what a step that has ended brings.
pausing.py       Pauses of a step, in which chats' prompts run.
leaving.py       Requests that leave: for lack of memory to the pool or to wait, or to go on at another worker.
pool_traffic.py  What goes to the pool: requests that leave, prompts, answers; the pages for that.
by_policy.py     The core with the scheduler and the memory that a policy names.
actor.py         The decode worker as a process.

Which requests are here, and with which memory, is in alignedserve/worker/; a scheduler plans steps
(alignedserve/schedulers/).
"""
