"""The statements that create the tables of queues, and those that migrate them. Pure: no I/O.

`{…}` are filled in by statements.py, which says what some of the columns hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

DialectName = Literal["postgresql", "mariadb", "mysql", "sqlite"]

SCHEMA_VERSION = 3

_DIGEST_INDEX = "CREATE INDEX {messages_index}_digest ON {messages} (digest, queue) WHERE digest IS NOT NULL"
_GROUP_INDEX = (
    "CREATE INDEX {messages_index}_group ON {messages} (group_id, state, place) WHERE group_id IS NOT NULL"
)
_DEDUP_INDEX = "CREATE INDEX {dedup_index}_until ON {dedup} (queue, until_ms)"

_POSTGRESQL_3 = (
    _GROUP_INDEX.replace("state", "(state + 0)"),  # see group_statements.py
    """CREATE TABLE {dedup} (
    queue bigint NOT NULL,
    dedup_key text COLLATE "C" NOT NULL,
    message bigint NOT NULL,
    until_ms bigint NOT NULL,
    PRIMARY KEY (dedup_key, queue)
) WITH (
    fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0
)""",
    _DEDUP_INDEX.replace("queue", "(queue + 0)"),
)
_POSTGRESQL_SCHEMA = (
    "CREATE TABLE {meta} (name text PRIMARY KEY, value text NOT NULL)",
    """CREATE TABLE {queues} (
    id bigint PRIMARY KEY, name text COLLATE "C" NOT NULL UNIQUE, settings text NOT NULL
)""",
    "CREATE SEQUENCE {numbers}",
    # Most rows are changed once and deleted soon. There is room on a page for the changed row, and dead
    # rows are removed when there are some thousands, not in proportion to the table, and without pauses.
    """CREATE TABLE {messages} (
    id bigint PRIMARY KEY,
    queue bigint NOT NULL,
    place bigint NOT NULL,
    until_ms bigint NOT NULL,
    since_ms bigint NOT NULL,
    enqueued_ms bigint NOT NULL,
    first_enqueued_ms bigint NOT NULL,
    take integer NOT NULL,
    requeues integer NOT NULL,
    state smallint NOT NULL,
    minus_priority smallint NOT NULL,
    reason text,
    message_key bytea,
    headers bytea,
    body bytea NOT NULL,
    digest bytea,
    group_id bigint,
    group_name text
) WITH (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_insert_scale_factor = 0.2,
    autovacuum_vacuum_cost_delay = 0,
    toast.autovacuum_vacuum_scale_factor = 0, toast.autovacuum_vacuum_threshold = 5000
)""",
    "CREATE INDEX {messages_index}_ready ON {messages} (queue, minus_priority, place) WHERE state = 0",
    "CREATE INDEX {messages_index}_until ON {messages} (queue, state, until_ms, id) WHERE state > 0",
    _DIGEST_INDEX,
    *_POSTGRESQL_3,
)

_OUR_COMMENT = "COMMENT = 'kmqpy'"
"""Marks tables of kmqpy, even while they are being created, which is no transaction in MariaDB and MySQL."""
_MARIADB_DEDUP = f"""CREATE TABLE IF NOT EXISTS {{dedup}} (
    queue bigint NOT NULL,
    dedup_key char(22) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    message bigint NOT NULL,
    until_ms bigint NOT NULL,
    PRIMARY KEY (queue, dedup_key),
    INDEX {{dedup_index}}_until (queue, until_ms)
) ENGINE = InnoDB {_OUR_COMMENT}"""
_MARIADB_SCHEMA = (
    f"""CREATE TABLE IF NOT EXISTS {{queues}} (
    id bigint PRIMARY KEY,
    name varchar(200) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL UNIQUE,
    settings mediumtext CHARACTER SET utf8mb4 NOT NULL
) ENGINE = InnoDB {_OUR_COMMENT}""",
    f"CREATE SEQUENCE IF NOT EXISTS {{numbers}} ENGINE = InnoDB {_OUR_COMMENT}",
    f"""CREATE TABLE IF NOT EXISTS {{messages}} (
    id bigint PRIMARY KEY,
    queue bigint NOT NULL,
    place bigint NOT NULL,
    until_ms bigint NOT NULL,
    since_ms bigint NOT NULL,
    enqueued_ms bigint NOT NULL,
    first_enqueued_ms bigint NOT NULL,
    take integer NOT NULL,
    requeues integer NOT NULL,
    state tinyint NOT NULL,
    minus_priority tinyint NOT NULL,
    reason mediumtext CHARACTER SET utf8mb4,
    message_key longblob,
    headers longblob,
    body longblob NOT NULL,
    digest binary(16),
    group_id bigint,
    group_name varchar(200) CHARACTER SET utf8mb4,
    INDEX {{messages_index}}_ready (queue, state, minus_priority, place),
    INDEX {{messages_index}}_until (queue, state, until_ms),
    INDEX {{messages_index}}_digest (digest, queue),
    INDEX {{messages_index}}_group (group_id, state, place)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC {_OUR_COMMENT}""",
    _MARIADB_DEDUP,
    f"""CREATE TABLE IF NOT EXISTS {{meta}} (
    name varchar(100) CHARACTER SET ascii PRIMARY KEY, value varchar(100) CHARACTER SET ascii NOT NULL
) ENGINE = InnoDB {_OUR_COMMENT}""",
)

_MYSQL_SCHEMA = tuple(
    text.replace("utf8mb4_nopad_bin", "utf8mb4_0900_bin").replace(
        "{messages} (\n    id bigint PRIMARY KEY", "{messages} (\n    id bigint AUTO_INCREMENT PRIMARY KEY"
    )
    for text in _MARIADB_SCHEMA
    if "SEQUENCE" not in text
)

# STRICT: without it SQLite stores text in a column of numbers, where another program writes it.
_SQLITE_3 = (
    _GROUP_INDEX,
    """CREATE TABLE {dedup} (
    queue integer NOT NULL, dedup_key text NOT NULL, message integer NOT NULL, until_ms integer NOT NULL,
    PRIMARY KEY (queue, dedup_key)
) STRICT, WITHOUT ROWID""",
    _DEDUP_INDEX,
)
_SQLITE_SCHEMA = (
    "CREATE TABLE {meta} (name text PRIMARY KEY, value text NOT NULL) STRICT",
    """CREATE TABLE {queues} (
    id integer PRIMARY KEY, name text NOT NULL UNIQUE, settings text NOT NULL
) STRICT""",
    "CREATE TABLE {numbers} (next integer NOT NULL) STRICT",
    "INSERT INTO {numbers} (next) VALUES (1)",
    """CREATE TABLE {messages} (
    id integer PRIMARY KEY,
    queue integer NOT NULL,
    place integer NOT NULL,
    until_ms integer NOT NULL,
    since_ms integer NOT NULL,
    enqueued_ms integer NOT NULL,
    first_enqueued_ms integer NOT NULL,
    take integer NOT NULL,
    requeues integer NOT NULL,
    state integer NOT NULL,
    minus_priority integer NOT NULL,
    reason text,
    message_key blob,
    headers blob,
    body blob NOT NULL,
    digest blob,
    group_id integer,
    group_name text
) STRICT""",
    "CREATE INDEX {messages_index}_ready ON {messages} (queue, minus_priority, place) WHERE state = 0",
    "CREATE INDEX {messages_index}_until ON {messages} (queue, state, until_ms) WHERE state <> 0",
    _DIGEST_INDEX,
    *_SQLITE_3,
)

SCHEMAS: Mapping[DialectName, Sequence[str]] = {
    "postgresql": _POSTGRESQL_SCHEMA,
    "mariadb": _MARIADB_SCHEMA,
    "mysql": _MYSQL_SCHEMA,
    "sqlite": _SQLITE_SCHEMA,
}

# To the next version, by version. In MariaDB and MySQL they are no transaction, so may begin again halfway.
MIGRATIONS: Mapping[int, Mapping[DialectName, Sequence[str]]] = {
    1: {
        "postgresql": ("ALTER TABLE {messages} ADD COLUMN digest bytea", _DIGEST_INDEX),
        "mariadb": (
            """ALTER TABLE {messages} ADD COLUMN IF NOT EXISTS digest binary(16),
    ADD INDEX IF NOT EXISTS {messages_index}_digest (digest, queue)""",
        ),
        "mysql": (),  # it came with version 3
        "sqlite": ("ALTER TABLE {messages} ADD COLUMN digest blob", _DIGEST_INDEX),
    },
    2: {
        "postgresql": (
            "ALTER TABLE {messages} ADD COLUMN group_id bigint, ADD COLUMN group_name text",
            *_POSTGRESQL_3,
        ),
        "mariadb": (
            """ALTER TABLE {messages} ADD COLUMN IF NOT EXISTS group_id bigint,
    ADD COLUMN IF NOT EXISTS group_name varchar(200) CHARACTER SET utf8mb4""",
            "ALTER TABLE {messages} ADD INDEX IF NOT EXISTS {messages_index}_group (group_id, state, place)",
            _MARIADB_DEDUP,
        ),
        "mysql": (),
        "sqlite": (
            "ALTER TABLE {messages} ADD COLUMN group_id integer",
            "ALTER TABLE {messages} ADD COLUMN group_name text",
            *_SQLITE_3,
        ),
    },
}
