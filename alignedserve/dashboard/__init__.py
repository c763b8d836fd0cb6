"""The live page: pictures of the deployment at a moment, and the page that shows them.

A gateway makes a picture each second of what its owner hears, and `simulate --page` makes the same of a simulated run.

picture.py     A picture of the deployment: what the page is given, as dataclasses that become JSON.
deployment.py  Gathers what parts report: who is there, queues, lengths on decode workers, pages of pools.
requests.py    Keeps what an owner saw of its requests in the last 15 minutes: throughput, attainment, the worst ones.
sharing.py     The requests of all owners, whichever gateway shows the page.
page.py        The page as HTML, live or with a recorded run in it.
"""
