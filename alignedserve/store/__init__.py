"""Where batch jobs, their files and their results are kept.

blobs.py         The bytes of files, each under its id, at a URL that fsspec knows: a folder of this machine,
job.py           A batch job, from what a user submitted to the files with its results. Only the standard
opening.py       From settings to a store and the bytes of its files.
redis_store.py   The store for several machines: Redis, from 6.0 on.
sqlite_store.py  The embedded store: one SQLite file, which several processes of a machine share.
store.py         What the gateway and the job runner need of a store, whichever it is.
"""
