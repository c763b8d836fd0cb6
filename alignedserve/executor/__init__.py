"""The code by which a worker's process performs the commands of its core on the engine.

building.py        One rank of a worker: its engine, its pace, its transport and its hands.
copies.py          Copies between the device and the pool's arena, and within the device.
hands.py           The hands of a worker: steps, transfers and copies, at once or beside later work.
leading.py         Rank 0 tells the other ranks what it does; they follow.
loading.py         Load the engine: threads, device, device cache, captured steps.
precision.py       How weights are kept, and how far the model is from the plain one.
work_watch.py      Watch that steps and copies end: a worker in which one goes on far too long ends itself.
worker_process.py  A worker's ranks as processes: rank 0 with core, shell and engine; the others follow it.
"""
