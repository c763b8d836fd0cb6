"""What the last released version wrote: a frame of each kind of message, stores with batches that have not ended, and
an arena with a page.

    data/       written by that version's own code
    wire.py     Examples of all messages, and the types that travel.
    write.py    Writes data/ again, at a release: `pytest tests/released/write.py` (CONTRIBUTING.md).

The tests hold today's code to what is there, since both versions meet in an upgrade (docs/guides/upgrade.md).
"""
