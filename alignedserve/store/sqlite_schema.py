"""The tables of the embedded store, and how they came to be."""

from __future__ import annotations

# The steps from each version of the schema to the next; a file's version is the number of steps that it has taken. In
# an upgrade the version before writes on to the file after a step: a step adds tables, and columns that have defaults.
MIGRATIONS = (
    """
    CREATE TABLE files (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, purpose TEXT NOT NULL,
        bytes INTEGER NOT NULL, expires_at INTEGER, record TEXT NOT NULL);
    CREATE INDEX files_of_owner ON files (owner, number);
    CREATE INDEX files_by_expiry ON files (expires_at) WHERE expires_at IS NOT NULL;
    CREATE TABLE jobs (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL,
        is_open INTEGER NOT NULL, revision INTEGER NOT NULL, record TEXT NOT NULL, forecast TEXT);
    CREATE INDEX jobs_of_owner ON jobs (owner, number);
    CREATE INDEX open_jobs ON jobs (number) WHERE is_open;
    CREATE TABLE results (
        job TEXT NOT NULL, line INTEGER NOT NULL, record TEXT NOT NULL, PRIMARY KEY (job, line)) WITHOUT ROWID;
    CREATE TABLE counts (
        job TEXT PRIMARY KEY, completed INTEGER NOT NULL, failed INTEGER NOT NULL, input_tokens INTEGER NOT NULL,
        cached_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL) WITHOUT ROWID;
    CREATE TABLE lease (
        one INTEGER PRIMARY KEY CHECK (one = 1), number INTEGER NOT NULL, holder TEXT, life INTEGER, until REAL);
    INSERT INTO lease VALUES (1, 0, NULL, NULL, NULL);
    """,
    """
    CREATE TABLE begun (id TEXT PRIMARY KEY, holder TEXT NOT NULL, life INTEGER NOT NULL, at REAL NOT NULL)
        WITHOUT ROWID;
    """,
    # Jobs that ended under older versions are kept for 30 days more.
    """
    ALTER TABLE jobs ADD COLUMN kept_until INTEGER;
    UPDATE jobs SET kept_until = strftime('%s', 'now') + 2592000 WHERE NOT is_open;
    CREATE INDEX ended_jobs ON jobs (kept_until) WHERE kept_until IS NOT NULL;
    """,
    """
    CREATE TABLE responses (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, bytes INTEGER NOT NULL,
        expires_at INTEGER NOT NULL, record TEXT NOT NULL);
    CREATE INDEX responses_of_owner ON responses (owner, number, bytes);
    CREATE INDEX responses_by_expiry ON responses (expires_at);
    """,
    "ALTER TABLE counts ADD COLUMN reasoning_tokens INTEGER NOT NULL DEFAULT 0;",
    "ALTER TABLE lease ADD COLUMN model TEXT;",
    "ALTER TABLE lease ADD COLUMN keys TEXT NOT NULL DEFAULT '';",
)
# A table that came without a step: the version before opens a file that has it, and leaves it alone.
COSTS = """
    CREATE TABLE IF NOT EXISTS costs (
        job TEXT PRIMARY KEY, device_us INTEGER NOT NULL, millijoules INTEGER NOT NULL, modelled_mj INTEGER NOT NULL)
        WITHOUT ROWID
"""
