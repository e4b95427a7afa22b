"""All SQL statements of all dialects, by name. Pure: no I/O.

`:name` is a parameter of a statement; statements() fills in `{…}`. Texts that dialects share stand here once.
docs/storages.md (section SQL) describes the tables; beside these are `dedup`, the digests of dedup ids,
`numbers`, and `meta`, the version of the schema. Some columns:

state     0 ready, 1 delayed, 2 taken, 3 dead, 4 behind another one of its group (group_statements.py)
place     among the rows of one priority, the smallest is taken first
until_ms  of a delayed row, when it is due; of a taken one, when its lease ends; of a dead one, when it was
          buried; of a ready one, 0. One index serves the first three
digest    of a row of a queue that collapses, while nobody has taken it; else NULL

Ids and places come from one sequence of numbers, so a row that is put has its id as its place. MySQL has no
sequences: ids come from AUTO_INCREMENT, places from the server's clock.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from kmqpy.errors import ConfigError
from kmqpy.storages.sql.group_statements import group_statements
from kmqpy.storages.sql.tables import MIGRATIONS, SCHEMA_VERSION, SCHEMAS, DialectName

DIALECTS: tuple[DialectName, ...] = ("postgresql", "mariadb", "mysql", "sqlite")

NO_LIMIT = 2**62
"""As a parameter, it means no limit: there are never as many rows, redeliveries or ms."""


RETRY_DIGITS = 12
"""How many digits each delay has in the parameter :retries."""

_NAME_PATTERN = re.compile(r"[a-z_][a-z0-9_]{0,30}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names of the tables: `prefix`, then the content, in `schema` (empty: the default schema)."""

    prefix: str = "kmq_"
    schema: str = ""

    def __post_init__(self) -> None:
        for setting, value in (("prefix", self.prefix), ("schema", self.schema or "none")):
            if not _NAME_PATTERN.fullmatch(value):
                raise ConfigError(f"{setting}: invalid name {value!r}: use 1 to 31 of a to z, 0 to 9 and _")

    @classmethod
    def of(cls, dialect: str, settings: Mapping[str, str]) -> Names:
        """The names by the settings `prefix` and `schema`, if they are given. Raises ConfigError."""
        names = cls(**{key: settings[key] for key in ("prefix", "schema") if key in settings})
        if names.schema and dialect != "postgresql":
            raise ConfigError("schema: only PostgreSQL has them; use prefix, or another database")
        return names

    @property
    def tables(self) -> dict[str, str]:
        """The tables (and the sequence, `numbers`) by what they hold, without the schema."""
        return {what: self.prefix + what for what in ("meta", "queues", "messages", "numbers", "dedup")}

    @property
    def qualified(self) -> dict[str, str]:
        """The names of `tables`, with the schema before them."""
        before = f"{self.schema}." if self.schema else ""
        return {what: before + name for what, name in self.tables.items()}


# --- what the dialects share --------------------------------------------------------------------------

COLUMNS = (
    "id, take, body, message_key, headers, minus_priority, requeues, enqueued_ms, first_enqueued_ms, "
    "since_ms, until_ms, reason, place, group_name"
)
_COLUMNS_WITHOUT_BODY = COLUMNS.replace("body", "length(body)", 1).replace("headers", "NULL", 1)

_GONE_ROW = (
    COLUMNS.replace("take", "take + 1", 1)
    .replace("since_ms", "{now}", 1)
    .replace("until_ms", "{now} + :lease_ms", 1)
)
"""COLUMNS of rows that are deleted as they are taken, with the values that a take would have set."""

_OVER_THE_LIMIT = "requeues >= :most"
_LEASE_ENDED = "state = 2 AND :automatic = 1 AND until_ms <= {now}"
"""The condition of a row whose lease has ended, before pass_time has changed the row."""
_IS_CURRENT = f"queue = :queue AND state <> 3 AND NOT ({_LEASE_ENDED} AND {_OVER_THE_LIMIT})"
# For rows that are looked up by id: `+ 0` keeps the database from reading all taken rows instead.
_HAS_LEASE = "state + 0 = 2 AND (:automatic = 0 OR until_ms > {now})"
_STILL_TAKEN = f"queue = :queue AND {_HAS_LEASE}"
# {any} holds for a row that is named with ANY_TAKE, {same} for one of which this is the take.
_IS_NAMED = "({same} OR {any})"
_CAN_EXTEND = f"(({{same}} AND {_STILL_TAKEN}) OR ({{any}} AND {_IS_CURRENT}))"
_DUE = "queue = :queue AND until_ms <= {now} AND (state = 1 OR (state = 2 AND :automatic = 1))"

_TAKE = "state = 2, take = take + 1, since_ms = {now}, until_ms = {now} + :lease_ms, digest = NULL"
_BURY = "state = 3, since_ms = {now}, until_ms = {now}, reason = :reason, digest = NULL"

# All right sides see the row as it was, in MariaDB by its sql_mode SIMULTANEOUS_ASSIGNMENT.
_ANEW = f"{{any}} AND NOT ({_HAS_LEASE})"
_EXTEND = f"""
    state       = 2,
    digest      = NULL,
    until_ms    = CASE WHEN {{any}} AND state = 2 AND until_ms > {{now}} + :lease_ms THEN until_ms
                       ELSE {{now}} + :lease_ms END,
    take        = CASE WHEN {_ANEW} THEN take + 1 ELSE take END,
    since_ms    = CASE WHEN {_ANEW} THEN {{now}} ELSE since_ms END,
    requeues    = CASE WHEN {_ANEW} AND state = 2 THEN requeues + 1 ELSE requeues END,
    enqueued_ms = CASE WHEN {_ANEW} AND state = 2 THEN until_ms ELSE enqueued_ms END,
    reason      = CASE WHEN {_ANEW} AND state = 2 THEN 'expired' ELSE reason END,
    place       = CASE WHEN {_ANEW} AND state = 2 AND :to_front = 0 THEN {{number}} ELSE place END"""
# The delay before a redelivery, by how often the row was redelivered before; shortened by up to `jitter`
# thousandths of it, by a number that looks random.
_RETRY = f"""CASE WHEN requeues < :retry_count
        THEN CAST(substr(:retries, 1 + {RETRY_DIGITS} * requeues, {RETRY_DIGITS}) AS {{integer}})
        ELSE :last_retry END"""
_RETRY = f"({_RETRY}) * (1000000 - :jitter * ((place % 1000003 * 7919 + :salt) % 1001)) / 1000000"
_IS_BACK_LATER = f"state = 2 AND :retry_count > 0 AND until_ms + {_RETRY} > {{now}}"
_PASS_TIME = f"""
    state       = CASE WHEN state = 2 AND {_OVER_THE_LIMIT} THEN 3 WHEN {_IS_BACK_LATER} THEN 1 ELSE 0 END,
    since_ms    = CASE WHEN state = 2 AND {_OVER_THE_LIMIT} THEN until_ms ELSE 0 END,
    until_ms    = CASE WHEN state = 2 AND {_OVER_THE_LIMIT} THEN until_ms
                       WHEN {_IS_BACK_LATER} THEN until_ms + {_RETRY} ELSE 0 END,
    requeues    = CASE WHEN state = 2 AND requeues < :most THEN requeues + 1 ELSE requeues END,
    enqueued_ms = CASE WHEN state = 2 AND requeues < :most THEN until_ms ELSE enqueued_ms END,
    reason      = CASE WHEN state = 2 THEN 'expired' ELSE reason END,
    place       = CASE WHEN state = 2 AND requeues < :most AND :to_front = 0 THEN {{number}} ELSE place END"""
_DELAY = f"CASE WHEN :delay_ms >= 0 THEN :delay_ms ELSE {_RETRY} END"
_GIVE_BACK = f"""
    state       = CASE WHEN :counted = 1 AND {_OVER_THE_LIMIT} THEN 3 WHEN {_DELAY} > 0 THEN 1 ELSE 0 END,
    since_ms    = CASE WHEN :counted = 1 AND {_OVER_THE_LIMIT} THEN {{now}} ELSE 0 END,
    until_ms    = CASE WHEN :counted = 1 AND {_OVER_THE_LIMIT} THEN {{now}}
                       WHEN {_DELAY} > 0 THEN {{now}} + {_DELAY} ELSE 0 END,
    requeues    = CASE WHEN :counted = 1 AND requeues < :most THEN requeues + 1 ELSE requeues END,
    enqueued_ms = CASE WHEN :counted = 1 AND requeues < :most THEN {{now}} ELSE enqueued_ms END,
    reason      = :reason,
    place       = CASE WHEN :to_front = 0 AND NOT (:counted = 1 AND {_OVER_THE_LIMIT})
                       THEN {{number}} ELSE place END"""
_RELEASE = """
    state    = 0,
    since_ms = 0,
    until_ms = 0,
    place    = CASE WHEN :to_front = 0 THEN {number} ELSE place END"""
_REDRIVE = """
    state       = 0,
    since_ms    = 0,
    until_ms    = 0,
    requeues    = 0,
    enqueued_ms = {now},
    reason      = NULL,
    place       = CASE WHEN :holds = 1 THEN place ELSE {number} END"""

_NEXT_DUE = """(SELECT min(at_ms) FROM (
        SELECT min(until_ms) AS at_ms FROM {messages} WHERE queue = :queue AND {not_ready}state = 1
        UNION ALL
        SELECT min(until_ms) FROM {messages} WHERE queue = :queue AND {not_ready}state = 2 AND :automatic = 1
    ) AS ends)"""
_EXISTS = "(SELECT count(*) FROM {queues} WHERE id = :queue)"
_READY = "FROM {messages} WHERE queue = :queue AND state = 0"
_ONE_IS_DUE = (
    "EXISTS (SELECT 1 FROM {{messages}} WHERE queue = :queue AND {{not_ready}}state = {state} "
    "AND until_ms <= {{now}})"
)
# Finds no rows if a delay or lease has ended (unless :late): pass_time comes first.
_NOTHING_DUE = f"""(:late = 1 OR NOT (
        {_ONE_IS_DUE.format(state=1)}
        OR (:automatic = 1 AND {_ONE_IS_DUE.format(state=2)})
    ))"""
_NEXT_READY = f"""{_READY} AND {_NOTHING_DUE} ORDER BY minus_priority, place LIMIT :limit"""
# `+ 0` keeps the database from reading all ready rows instead.
_TWINS = "FROM {messages} WHERE queue = :queue AND state + 0 = 0 AND digest IS NOT NULL AND digest"
_COUNT = "(SELECT count(*) FROM {{messages}} WHERE queue = :queue AND {state})"
_COUNT_SOME = (
    "(SELECT count(*) FROM (SELECT 1 FROM {{messages}} WHERE queue = :queue AND {state} "
    "LIMIT :limit) AS some_{name})"
)
_STATES = {
    "ready": "state = 0",
    "delayed": "{not_ready}state = 1",
    "taken": "{not_ready}state = 2",
    "dead": "{not_ready}state = 3",
    "behind": "{not_ready}state = 4",
}

_SHARED = {
    "schema_version": "SELECT value FROM {meta} WHERE name = 'schema_version'",
    "storage_id": "SELECT value FROM {meta} WHERE name = 'storage_id'",
    "set_schema_version": "UPDATE {meta} SET value = :version WHERE name = 'schema_version'",
    "describe_storage": "INSERT INTO {meta} (name, value) VALUES (:name, :value)",
    "find_queue": "SELECT id, settings FROM {queues} WHERE name = :name",
    "settings": "SELECT settings FROM {queues} WHERE id = :queue",
    "alter_queue": "UPDATE {queues} SET settings = :settings WHERE id = :queue",
    "queue_exists": f"SELECT {_EXISTS}",
    "queue_names": "SELECT name FROM {queues}",
    "delete_queue": "DELETE FROM {queues} WHERE id = :queue",
    # Then `give_back` or `bury` changes the row in the same transaction, so nobody sees it taken.
    "add_again": """INSERT INTO {messages} (id, queue, place, until_ms, since_ms, enqueued_ms,
    first_enqueued_ms, take, requeues, state, minus_priority, message_key, headers, body, group_name)
VALUES (:id, :queue, :place, :until_ms, 0, :enqueued_ms, :first_enqueued_ms, :take, :requeues, 2,
    :minus_priority, :key, :headers, :body, :group) {or_nothing}""",
    "situation": f"SELECT {{now}}, {_NEXT_DUE}, {_EXISTS}, EXISTS (SELECT 1 {_READY})",
    "peek": f"SELECT {COLUMNS} {_READY} ORDER BY minus_priority, place LIMIT :limit",
    "counts": f"SELECT {', '.join(_COUNT.format(state=state) for state in _STATES.values())}",
    "some_counts": "SELECT "
    + ", ".join(_COUNT_SOME.format(name=name, state=state) for name, state in _STATES.items()),
    "taken_rows": f"""SELECT {COLUMNS} FROM {{messages}}
WHERE queue = :queue AND {{not_ready}}state = 2 AND id > :after
  AND since_ms < {{now}} - :taken_for_ms AND enqueued_ms < :queued_before_ms
ORDER BY id LIMIT :limit""",
    "dead_rows": f"""SELECT {COLUMNS} FROM {{messages}} WHERE queue = :queue AND {{not_ready}}state = 3
ORDER BY until_ms, id LIMIT :limit""",
    "dead_rows_without_bodies": f"""SELECT {_COLUMNS_WITHOUT_BODY} FROM {{messages}}
WHERE queue = :queue AND {{not_ready}}state = 3 ORDER BY until_ms, id LIMIT :limit""",
    # Two statements, each by an index.
    "purge_ready": "DELETE FROM {messages} WHERE queue = :queue AND state = 0",
    "purge_unready": "DELETE FROM {messages} WHERE queue = :queue AND {not_ready}state IN (1, 2, 4)",
    "purge_dead": "DELETE FROM {messages} WHERE queue = :queue AND {not_ready}state = 3",
}


def _read_some(checksum: str) -> str:
    """Reads, of messages in the order of their ids, all that may be long to its last byte."""
    sums = ", ".join(f"{checksum}({one})" for one in ("body", "message_key", "headers", "reason"))
    return f"SELECT id, {sums} FROM {{messages}} WHERE id > :after ORDER BY id LIMIT :limit"


# --- PostgreSQL ---------------------------------------------------------------------------------------

# `= ANY (ARRAY[…])` is looked up by the primary key whatever the statistics say. Those of a queue that was
# empty when they were made let the planner read the whole table for `=`.
_CHOSEN = """WITH chosen AS MATERIALIZED (
    SELECT id, nextval('{{numbers}}') AS number FROM (
        SELECT id FROM {{messages}} {rows} FOR UPDATE{skip}
    ) AS locked
)
UPDATE {{messages}} AS m SET {change} FROM chosen WHERE m.id = ANY (ARRAY[chosen.id])"""
_NEXT_NUMBER = "nextval('{numbers}')"
_REFS = (
    "unnest(CAST(:ids AS bigint[]), CAST(:takes AS bigint[])) WITH ORDINALITY "
    "AS ref(ref_id, ref_take, ref_number)"
)
_TAKES = "unnest(CAST(:ids AS bigint[]), CAST(:takes AS bigint[])) AS ref(ref_id, ref_take)"


def _by_ref(text: str) -> str:
    """The text with conditions on a row `ref` beside the message."""
    return text.replace("{same}", "take = ref_take").replace("{any}", "ref_take < 0")


def _chosen(change: str, rows: str, skip: str = "") -> str:
    return _CHOSEN.format(rows=rows, skip=skip, change=change.replace("{number}", "chosen.number"))


_PUT = """INSERT INTO {messages} (id, queue, place, until_ms, since_ms, enqueued_ms, first_enqueued_ms,
    take, requeues, state, minus_priority, message_key, headers, body, digest, group_id, group_name)
SELECT new.id, queue.id, new.id, CASE WHEN delay_ms > 0 THEN {now} + delay_ms ELSE 0 END, 0, {now}, {now},
    0, 0, CASE WHEN delay_ms > 0 THEN 1 WHEN behind > 0 THEN 4 ELSE 0 END, -coalesce(priority, 0),
    message_key, headers, body, digest, group_id, group_name
FROM (SELECT id FROM {queues} WHERE id = :queue FOR KEY SHARE) AS queue
CROSS JOIN (
    SELECT nextval('{numbers}') AS id, given.*
    FROM unnest(
        CAST(:bodies AS bytea[]), CAST(:keys AS bytea[]), CAST(:headers AS bytea[]),
        CAST(:delays AS bigint[]), CAST(:priorities AS smallint[]), CAST(:digests AS bytea[]),
        CAST(:group_ids AS bigint[]), CAST(:groups AS text[]), CAST(:behind AS smallint[])
    ) WITH ORDINALITY AS given(
        body, message_key, headers, delay_ms, priority, digest, group_id, group_name, behind, number
    )
    ORDER BY number
) AS new
RETURNING id"""
# Puts nothing if a key was used before: put_unique() knows more. If another put stores one meanwhile, this
# violates the primary key, since ON CONFLICT would cost more.
_NEW_KEYS = """WITH new AS MATERIALIZED ({new}), claimed AS (
    INSERT INTO {dedup} (queue, dedup_key, message, until_ms)
    SELECT queue.id, new.dedup_key, new.id, {now} + :window_ms
    FROM (SELECT id FROM {queues} WHERE id = :queue FOR KEY SHARE) AS queue CROSS JOIN new
    WHERE NOT EXISTS (
        SELECT 1 FROM {dedup} WHERE queue = :queue AND dedup_key = ANY (CAST(:new_keys AS text[]))
    )
    ORDER BY new.dedup_key RETURNING message
)
"""


def _put_new() -> str:
    before, new, after = re.split(r"CROSS JOIN \((.*)\) AS new", _PUT, flags=re.DOTALL)
    new = new.replace("unnest(", "unnest(CAST(:new_keys AS text[]),").replace("given(", "given(dedup_key,")
    are_new = "WHERE EXISTS (SELECT 1 FROM claimed)"
    return f"{_NEW_KEYS.replace('{new}', new)}{before}CROSS JOIN new {are_new}{after}"


_NO_SYNC = "set_config('synchronous_commit', 'off', true)"
_POSTGRESQL = {
    "read_some": _read_some("md5"),
    "create_queue": """INSERT INTO {queues} (id, name, settings) VALUES (:queue, :name, :settings)
ON CONFLICT (name) DO NOTHING""",
    # The lock on the queue lets delete_queue wait until the rows can be seen, and deleted.
    "lock_queue": "SELECT id FROM {queues} WHERE id = :queue FOR KEY SHARE",
    "lock_settings": "SELECT settings FROM {queues} WHERE id = :queue FOR NO KEY UPDATE",
    "put": _PUT,
    "put_numbered": _PUT.replace("nextval('{numbers}') AS id, given.*", "given.*")
    .replace("unnest(", "unnest(CAST(:ids AS bigint[]),")
    .replace("AS given(", "AS given(id,"),
    "put_new": _put_new(),
    "take": f"""UPDATE {{messages}} SET {_TAKE} WHERE id = ANY (ARRAY(
    SELECT id {_NEXT_READY} FOR UPDATE SKIP LOCKED
)) RETURNING {COLUMNS}""",
    "take_for_good": f"""DELETE FROM {{messages}} WHERE id = ANY (ARRAY(
    SELECT id {_NEXT_READY} FOR UPDATE SKIP LOCKED
)) RETURNING {_GONE_ROW}""",
    # Puts of others go on beside it: their lock is KEY SHARE. The next taker does not wait for the sync of
    # this transaction, which `sync` makes up for: a lock is a write, whose sync includes earlier ones.
    "sync": "SELECT id FROM {queues} WHERE id = :queue FOR KEY SHARE",
    "take_turn": f"SELECT {_NO_SYNC} FROM {{queues}} WHERE id = :queue FOR NO KEY UPDATE",
    "take_turn_settings": f"SELECT settings, {_NO_SYNC} FROM {{queues}} WHERE id = :queue FOR NO KEY UPDATE",
    "pick": f"SELECT {COLUMNS}, digest {_NEXT_READY} FOR UPDATE SKIP LOCKED",
    "take_picked": f"UPDATE {{messages}} SET {_TAKE} WHERE id = ANY (CAST(:ids AS bigint[]))",
    "take_picked_for_good": "DELETE FROM {messages} WHERE id = ANY (CAST(:ids AS bigint[]))",
    "remove_twins": f"""DELETE FROM {{messages}} WHERE id = ANY (ARRAY(
    SELECT id {_TWINS} = ANY (CAST(:digests AS bytea[])) FOR UPDATE SKIP LOCKED
))""",
    "pass_time": _chosen(_PASS_TIME, f"WHERE {_DUE} ORDER BY until_ms, place LIMIT :limit", " SKIP LOCKED"),
    "finish": _by_ref(
        f"DELETE FROM {{messages}} AS m USING {_TAKES} "
        f"WHERE id = ANY (ARRAY[ref_id]) AND {_IS_NAMED} AND {_IS_CURRENT}"
    ),
    "extend": _by_ref(
        f"UPDATE {{messages}} AS m SET {_EXTEND.replace('{number}', _NEXT_NUMBER)} FROM {_TAKES} "
        f"WHERE id = ANY (ARRAY[ref_id]) AND {_CAN_EXTEND}"
    ),
    "still_taken": _by_ref(
        f"SELECT ref_id, ref_take FROM {_TAKES} JOIN {{messages}} ON id = ANY (ARRAY[ref_id]) "
        f"WHERE {_IS_NAMED} AND {_STILL_TAKEN}"
    ),
    "bury": _by_ref(
        f"UPDATE {{messages}} AS m SET {_BURY} FROM {_TAKES} "
        f"WHERE id = ANY (ARRAY[ref_id]) AND {_IS_NAMED} AND {_IS_CURRENT}"
    ),
    "give_back": _by_ref(f"""WITH chosen AS MATERIALIZED (
    SELECT id, {_NEXT_NUMBER} AS number FROM (
        SELECT m.id FROM {_REFS} JOIN {{messages}} AS m ON m.id = ANY (ARRAY[ref_id])
        WHERE {_IS_NAMED} AND {_STILL_TAKEN} ORDER BY ref_number FOR UPDATE OF m
    ) AS locked
)
UPDATE {{messages}} AS m SET {_GIVE_BACK.replace("{number}", "chosen.number")}
FROM chosen WHERE m.id = ANY (ARRAY[chosen.id])"""),
    "release_all": _chosen(_RELEASE, "WHERE queue = :queue AND state = 2 ORDER BY id + 0"),
    "redrive": _chosen(_REDRIVE, "WHERE queue = :queue AND state = 3 ORDER BY until_ms, id LIMIT :limit"),
    "redrive_ids": _chosen(
        _REDRIVE,
        "WHERE queue = :queue AND state = 3 AND id = ANY (CAST(:ids AS bigint[])) ORDER BY until_ms, id",
    ),
    "notify": "SELECT pg_notify(:channel, queue) FROM unnest(CAST(:arrived AS text[])) AS queue",
    "lock_schema": "SELECT pg_advisory_xact_lock(:lock)",
}

# --- MariaDB ------------------------------------------------------------------------------------------


def _in_order(change: str, rows: str) -> str:
    return f"UPDATE {{messages}} SET {change.replace('{number}', 'NEXT VALUE FOR {numbers}')} {rows}"


def _by_list(text: str) -> str:
    """The text with conditions on the ids and pairs of the parameters.

    MariaDB looks ids up by the primary key; it would not do so for the pairs alone.
    """
    return text.replace("{same}", "(id, take) IN :takes").replace("{any}", "id IN :any_ids")


_MARIADB = {
    "read_some": _read_some("crc32"),  # MySQL 9.6 has no md5()
    "other_engines": """SELECT table_name, engine FROM information_schema.tables WHERE engine <> 'InnoDB'
AND table_schema = database()
AND table_name IN ('{meta}', '{queues}', '{messages}', '{numbers}', '{dedup}')""",
    "create_queue": "INSERT IGNORE INTO {queues} (id, name, settings) VALUES (:queue, :name, :settings)",
    "lock_queue": "SELECT id, @@auto_increment_increment FROM {queues} WHERE id = :queue LOCK IN SHARE MODE",
    "lock_settings": "SELECT settings FROM {queues} WHERE id = :queue FOR UPDATE",
    "put": """INSERT INTO {messages} (id, queue, place, until_ms, since_ms, enqueued_ms, first_enqueued_ms,
    take, requeues, state, minus_priority, message_key, headers, body, digest, group_id, group_name)
VALUES {rows} RETURNING id""",
    "put_row": """(NEXT VALUE FOR {numbers}, :queue, PREVIOUS VALUE FOR {numbers},
    CASE WHEN :delay_ms > 0 THEN {now} + :delay_ms ELSE 0 END, 0, {now}, {now},
    0, 0, CASE WHEN :delay_ms > 0 THEN 1 ELSE 4 * :behind END, -:priority, :key, :headers, :body, :digest,
    :group_id, :group)""",
    # With the id that a dedup key has.
    "put_numbered": """(:id, :queue, :place,
    CASE WHEN :delay_ms > 0 THEN {now} + :delay_ms ELSE 0 END, 0, {now}, {now},
    0, 0, CASE WHEN :delay_ms > 0 THEN 1 ELSE 4 * :behind END, -:priority, :key, :headers, :body, :digest,
    :group_id, :group)""",
    # A put locks the row of the queue, also in a transaction of the application's; so takers lock another.
    "take_turn": """INSERT INTO {meta} (name, value) VALUES (concat('turn of ', :queue), '')
ON DUPLICATE KEY UPDATE value = value""",
    "forget_turn": "DELETE FROM {meta} WHERE name = concat('turn of ', :queue)",
    # By another index, MySQL sorts and so locks all ready rows, and other takers get nothing.
    "pick": f"SELECT {COLUMNS}, digest {_READY} ORDER BY minus_priority, place LIMIT :limit "
    "FOR UPDATE SKIP LOCKED".replace(" WHERE ", " FORCE INDEX ({messages_index}_ready) WHERE "),
    "twins": f"SELECT id {_TWINS} IN :digests FOR UPDATE SKIP LOCKED".replace(
        " WHERE ", " FORCE INDEX ({messages_index}_digest) WHERE "
    ),
    "take_picked": f"UPDATE {{messages}} SET {_TAKE} WHERE id IN :ids",
    "take_picked_for_good": "DELETE FROM {messages} WHERE id IN :ids",
    "due": f"SELECT id FROM {{messages}} WHERE {_DUE} ORDER BY until_ms, place LIMIT :limit "
    "FOR UPDATE SKIP LOCKED",
    "pass_time": _in_order(_PASS_TIME, "WHERE id IN :ids ORDER BY until_ms, place"),
    "finish": _by_list(f"DELETE FROM {{messages}} WHERE id IN :ids AND {_IS_NAMED} AND {_IS_CURRENT}"),
    "extend": _by_list(_in_order(_EXTEND, f"WHERE id IN :ids AND {_CAN_EXTEND}")),
    "still_taken": _by_list(
        "SELECT id, CASE WHEN {any} THEN -1 ELSE take END FROM {messages} "
        f"WHERE id IN :ids AND {_IS_NAMED} AND {_STILL_TAKEN}"
    ),
    "bury": _by_list(f"UPDATE {{messages}} SET {_BURY} WHERE id IN :ids AND {_IS_NAMED} AND {_IS_CURRENT}"),
    "give_back": _by_list(
        _in_order(
            _GIVE_BACK,
            f"WHERE id IN :ids AND {_IS_NAMED} AND {_STILL_TAKEN} ORDER BY find_in_set(id, :order)",
        )
    ),
    "release_all": _in_order(_RELEASE, "WHERE queue = :queue AND state = 2 ORDER BY id + 0"),
    "redrive": _in_order(_REDRIVE, "WHERE queue = :queue AND state = 3 ORDER BY until_ms, id LIMIT :limit"),
    "redrive_ids": _in_order(
        _REDRIVE, "WHERE queue = :queue AND state = 3 AND id IN :ids ORDER BY until_ms, id"
    ),
    "lock_schema": "SELECT get_lock(:lock, 60)",
    "unlock_schema": "SELECT release_lock(:lock)",
}

# --- MySQL: as MariaDB, but for what has a number -----------------------------------------------------

# Microseconds, and room for the rows of one statement. They need not be unique: rows of one place are equals.
_PLACE = "timestampdiff(MICROSECOND, '1970-01-01', utc_timestamp(6)) * 2048"
_TARGET_OR_COLUMN = re.compile(
    r"(?m)^    (\w+)(?= *=)|(?<![:.\w'])(id|take|since_ms|until_ms|enqueued_ms|"
    r"requeues|state|reason|place)\b"
)


def _from_old(change: str, order: str, rows: str) -> str:
    """An UPDATE whose right sides see rows as they were; else MySQL has changed what stands further left."""
    assignments = _TARGET_OR_COLUMN.sub(
        lambda one: f"    m.{one[1]}" if one[1] else f"old.{one[2]}", _by_list(change)
    )
    return (
        "UPDATE (SELECT id, take, since_ms, until_ms, enqueued_ms, requeues, state, reason, place, "
        f"row_number() OVER (ORDER BY {order}) AS number FROM {{messages}} {_by_list(rows)} "
        f"FOR UPDATE) AS old STRAIGHT_JOIN {{messages}} AS m ON m.id = old.id SET "
        + assignments.replace("{number}", f"{_PLACE} + old.number")
    )


_MYSQL = {
    **_MARIADB,
    "put": _MARIADB["put"].replace("(id, ", "(").replace(" RETURNING id", ""),
    "put_row": _MARIADB["put_row"]
    .replace("NEXT VALUE FOR {numbers}, ", "")
    .replace("PREVIOUS VALUE FOR {numbers}", f"{_PLACE} + :at"),
    "pass_time": _from_old(_PASS_TIME, "until_ms, place", "WHERE id IN :ids"),
    "extend": _from_old(_EXTEND, "id", f"WHERE id IN :ids AND {_CAN_EXTEND}"),
    "give_back": _from_old(
        _GIVE_BACK, "find_in_set(id, :order)", f"WHERE id IN :ids AND {_IS_NAMED} AND {_STILL_TAKEN}"
    ),
    "release_all": _from_old(_RELEASE, "id + 0", "WHERE queue = :queue AND state = 2"),
    "redrive": _from_old(
        _REDRIVE, "until_ms, id", "WHERE queue = :queue AND state = 3 ORDER BY until_ms, id LIMIT :limit"
    ),
    "redrive_ids": _from_old(_REDRIVE, "until_ms, id", "WHERE queue = :queue AND state = 3 AND id IN :ids"),
}

# --- SQLite -------------------------------------------------------------------------------------------


def _numbered(change: str, order: str, rows: str) -> str:
    return (
        f"UPDATE {{messages}} AS m SET {change.replace('{number}', 'chosen.number')} "
        f"FROM (SELECT id, :number + row_number() OVER (ORDER BY {order}) - 1 AS number "
        f"FROM {{messages}} {rows}) AS chosen WHERE m.id = chosen.id"
    )


_LISTED = "(SELECT value FROM json_each(:ids))"
_LISTED_REFS = (
    "(SELECT json_extract(value, '$[0]') AS ref_id, json_extract(value, '$[1]') AS ref_take, "
    "key AS ref_number FROM json_each(:refs)) AS ref"
)
_REF_NUMBER = ":number + ref_number"

# An index for each state, unlike with _DUE.
_SQLITE_DUE = (
    "queue = :queue AND {not_ready}state IN (1, CASE WHEN :automatic = 1 THEN 2 ELSE 1 END) "
    "AND until_ms <= {now}"
)

# Each parameter costs: few messages have groups.
_SQLITE_PUT = """INSERT INTO {messages} (id, queue, place, until_ms, since_ms, enqueued_ms, first_enqueued_ms,
    take, requeues, state, minus_priority, message_key, headers, body, digest, group_id, group_name)
SELECT :id, id, :id, CASE WHEN :delay_ms > 0 THEN {now} + :delay_ms ELSE 0 END, 0, {now}, {now},
    0, 0, CASE WHEN :delay_ms > 0 THEN 1 ELSE 4 * :behind END, -:priority, :key, :headers, :body, :digest,
    :group_id, :group
FROM {queues} WHERE id = :queue"""

_SQLITE = {
    "check_all": "PRAGMA integrity_check(1)",  # indexes, too
    "create_queue": "INSERT OR IGNORE INTO {queues} (id, name, settings) VALUES (:queue, :name, :settings)",
    "lock_queue": "SELECT id FROM {queues} WHERE id = :queue",  # a transaction has locked the database
    "lock_settings": "SELECT settings FROM {queues} WHERE id = :queue",
    "draw": "UPDATE {numbers} SET next = next + :count RETURNING next - :count",
    "put": _SQLITE_PUT.replace(", group_id, group_name)", ")")
    .replace(",\n    :group_id, :group", "")
    .replace("4 * :behind", "0"),
    "put_grouped": _SQLITE_PUT,
    "take": f"UPDATE {{messages}} SET {_TAKE} WHERE id IN (SELECT id {_NEXT_READY}) RETURNING {COLUMNS}",
    "take_for_good": f"DELETE FROM {{messages}} WHERE id IN (SELECT id {_NEXT_READY}) RETURNING {_GONE_ROW}",
    "take_turn": "SELECT id FROM {queues} WHERE id = :queue",
    "pick": f"SELECT {COLUMNS}, digest {_NEXT_READY}",
    "take_picked": f"UPDATE {{messages}} SET {_TAKE} WHERE id IN {_LISTED}",
    "take_picked_for_good": f"DELETE FROM {{messages}} WHERE id IN {_LISTED}",
    "remove_twins": f"DELETE {_TWINS} = :digest",
    "pass_time": _numbered(
        _PASS_TIME, "until_ms, place", f"WHERE {_SQLITE_DUE} ORDER BY until_ms, place LIMIT :limit"
    ),
    "finish": _by_ref(
        f"DELETE FROM {{messages}} WHERE id IN (SELECT id FROM {_LISTED_REFS} CROSS JOIN {{messages}} "
        f"ON id = ref_id WHERE {_IS_NAMED} AND {_IS_CURRENT})"
    ),
    "extend": _by_ref(
        f"UPDATE {{messages}} AS m SET {_EXTEND.replace('{number}', _REF_NUMBER)} FROM {_LISTED_REFS} "
        f"WHERE id = ref_id AND {_CAN_EXTEND}"
    ),
    "still_taken": _by_ref(
        f"SELECT ref_id, ref_take FROM {_LISTED_REFS} CROSS JOIN {{messages}} ON id = ref_id "
        f"WHERE {_IS_NAMED} AND {_STILL_TAKEN}"
    ),
    "bury": _by_ref(
        f"UPDATE {{messages}} AS m SET {_BURY} FROM {_LISTED_REFS} "
        f"WHERE id = ref_id AND {_IS_NAMED} AND {_IS_CURRENT}"
    ),
    "give_back": _by_ref(
        f"UPDATE {{messages}} AS m SET {_GIVE_BACK.replace('{number}', _REF_NUMBER)} FROM {_LISTED_REFS} "
        f"WHERE id = ref_id AND {_IS_NAMED} AND {_STILL_TAKEN}"
    ),
    "release_all": _numbered(_RELEASE, "id + 0", "WHERE queue = :queue AND {not_ready}state = 2"),
    "redrive": _numbered(
        _REDRIVE,
        "until_ms, id",
        "WHERE queue = :queue AND {not_ready}state = 3 ORDER BY until_ms, id LIMIT :limit",
    ),
    "redrive_ids": _numbered(
        _REDRIVE, "until_ms, id", f"WHERE queue = :queue AND state = 3 AND id IN {_LISTED}"
    ),
    "changes": "PRAGMA data_version",
}

# --- the texts ----------------------------------------------------------------------------------------

_NOW: Mapping[str, str] = {
    # The time of the statement, not of the transaction; a subquery is worked out once, not for each row.
    "postgresql": "(SELECT CAST(floor(extract(epoch FROM statement_timestamp()) * 1000) AS bigint))",
    # Of no time zone: those of sessions differ, and have hours that come twice.
    **dict.fromkeys(
        ("mariadb", "mysql"), "(timestampdiff(MICROSECOND, '1970-01-01', utc_timestamp(3)) DIV 1000)"
    ),
    "sqlite": ":now_ms",
}
# SQLite uses a partial index only for statements that have its very condition, and with `state > 0` it
# would not look for one state in it.
_NOT_READY = {"sqlite": "state <> 0 AND "}
_OR_NOTHING = dict.fromkeys(("mariadb", "mysql"), "ON DUPLICATE KEY UPDATE id = id")
_OWN: Mapping[str, Mapping[str, str]] = {
    "postgresql": _POSTGRESQL,
    "mariadb": _MARIADB,
    "mysql": _MYSQL,
    "sqlite": _SQLITE,
}
_INTEGER = {"postgresql": "bigint", "sqlite": "integer"}
_PARAMETER = re.compile(r"(?<![:\w]):([a-z_]+)")


def statements(dialect: DialectName, names: Names) -> dict[str, str]:
    """All statements of a dialect by name, with parameters in the form of its driver."""
    own = _OWN[dialect]
    texts = {**_SHARED, **_groups(dialect), **own}
    return {name: _driver_text(dialect, _filled(dialect, names, text)) for name, text in texts.items()}


def _groups(dialect: DialectName) -> dict[str, str]:
    others = {**_SHARED, **_OWN[dialect]}
    current = _IS_CURRENT.replace("state", "state + 0")
    return group_statements(
        dialect, others, columns=COLUMNS, nothing_due=_NOTHING_DUE, is_current=current, take=_TAKE
    )


def schema(dialect: DialectName, names: Names) -> list[str]:
    """The statements that create the tables, but not the rows of the meta table."""
    return [_filled(dialect, names, text) for text in SCHEMAS[dialect]]


def migrations(dialect: DialectName, names: Names) -> dict[int, list[str]]:
    """The statements that migrate the tables to the next version, by version."""
    return {
        version: [_filled(dialect, names, text) for text in texts[dialect]]
        for version, texts in MIGRATIONS.items()
    }


def script(dialect: DialectName, names: Names) -> str:
    """The text that `kmq sql schema` prints: schema(), and the row with the schema version."""
    version = (
        f"INSERT INTO {names.qualified['meta']} (name, value) VALUES ('schema_version', '{SCHEMA_VERSION}')"
    )
    return "".join(f"{text};\n" for text in [*schema(dialect, names), version])


def _filled(dialect: DialectName, names: Names, text: str) -> str:
    values = {
        **names.qualified,
        "now": _NOW[dialect],
        "not_ready": _NOT_READY.get(dialect, ""),
        "or_nothing": _OR_NOTHING.get(dialect, "ON CONFLICT (id) DO NOTHING"),
        "integer": _INTEGER.get(dialect, "SIGNED"),
        "messages_index": names.tables["messages"],
        "dedup_index": names.tables["dedup"],
    }
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def _driver_text(dialect: DialectName, text: str) -> str:
    if dialect == "sqlite":
        return text
    text = text.replace("%", "%%")
    # To PostgreSQL in binary form: bodies are not escaped, and lists need no parsing.
    return _PARAMETER.sub(r"%(\1)b" if dialect == "postgresql" else r"%(\1)s", text)
