"""The stores of batch jobs, their files and their results.

address.py       Addresses of Redis as they may be shown, without passwords.
blobs.py         Keeps the bytes of files: in a folder of this machine, or at s3:// and other URLs.
job.py           A batch job, from what a user submitted to the files with its results.
redis_client.py  The connection to Redis: to one server, or to the master that Sentinels or a Redis Cluster name.
redis_store.py   The store for several machines: Redis, from 6.0 on.
sqlite_store.py  The embedded store: one SQLite file, which several processes of a machine share.
storage.py       Opens the store and the files that the settings name, and keeps the two consistent.
store.py         The interface of a store to the gateway and the job runner.
"""
