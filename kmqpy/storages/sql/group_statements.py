"""The SQL statements for groups and for dedup ids; see statements.py. Pure: no I/O.

In a queue with order="group", of which Engine's rule 11 tells, two columns of a message are used:

group_id  the number of its group: a digest of the names of queue and group, so no two queues share one
state     4 behind: it waits for another message of its group, and no take looks at it

State 0 (ready) is a guess there: a take looks at the others of the group, with the lock of `take_turn`, and
takes the message or makes it wait behind. The latter it does with another one of the group locked: whoever
finishes that one, makes the first of those behind ready when it is gone (`first_behind`, `show`). So none is
forgotten, and senders need no lock: of the messages of a group that are put at once the first one is ready,
and the others wait behind it.

InnoDB releases the locks of a commit one by one, so whoever finishes may pass over a message that waits
already. There, a take that has made messages wait looks again after its commit (`stranded`). On any server,
whoever finishes passes over what a transaction of an application has locked, which may be rolled back. So now
and then each engine looks through those that wait, a part at a time, for groups in which nothing comes.

In a queue with shares (rule 13) it is the same, but that a message waits behind the first ready one of its
group, or behind as many taken ones as the group may have. In the place of the priority there is a rank,
another guess: how many of the group are taken. So a take finds what it should return by the order of the
ready messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def _first(column: str, state: int) -> str:
    return (
        f"(SELECT f.{column} FROM {{messages}} AS f WHERE f.group_id = m.group_id AND {{of_group}} = {state} "
        "ORDER BY f.place LIMIT 1)"
    )


def _none_of_group(states: str, more: str) -> str:
    """The condition that no row of the group is in one of these states: one scan of the index."""
    return (
        f"(SELECT 1 FROM {{messages}} AS f WHERE f.group_id = m.group_id "
        f"AND {{of_group}} IN ({states}) {more} LIMIT 1) IS NULL"
    )


# Each subquery looks at one entry of the index by group, state and place.
_AROUND = ", ".join(
    (
        _first("place", 0) + " AS first_ready",
        _first("place", 1) + " AS first_delayed",
        _first("id", 1) + " AS delayed_id",
        _first("id", 2) + " AS taken_id",
        _first("id", 3) + " AS dead_id",
        _first("place", 4) + " AS first_behind",
    )
)
_NEXT = (
    "(SELECT f.place FROM {messages} AS f WHERE f.group_id = m.group_id AND {of_group} = 0 "
    "AND f.place > m.place ORDER BY f.place LIMIT 1)"
)
_PICK = f"""SELECT m.id, m.place, m.group_id, {_AROUND}, {_NEXT} AS next_ready FROM {{messages}} AS m
WHERE m.queue = :queue AND m.state = 0 AND m.minus_priority = 0 AND m.place > :after
    AND {{nothing_due}}
ORDER BY m.minus_priority, m.place LIMIT :limit"""
_FOLLOWERS = """SELECT * FROM (SELECT id, place, 0 AS is_delayed FROM {messages} AS f
    WHERE group_id = :group_id AND {of_group} = 0 AND place > :after ORDER BY place LIMIT :limit) AS ready
UNION ALL SELECT * FROM (SELECT id, place, CASE WHEN until_ms > {now} THEN 1 ELSE 0 END
    FROM {messages} AS f WHERE group_id = :group_id AND {of_group} = 4 AND place > :after
    ORDER BY place LIMIT :limit) AS others"""
_FOLLOWERS_OF_HEAD = (
    _FOLLOWERS.replace(":group_id", "m.group_id").replace(":after", "m.place").replace(":limit", ":follow")
)
# A take by one statement: of the first ready rows, those that wait for nothing (heads), each with what may
# follow it (wanted; :follow rows at most). Behind a row that is delayed, or that somebody else has locked,
# nothing of its group is taken: `stopped` has the place of the first such row behind each head. How many it
# takes it leaves to sync_taken in a setting of the session.
_TAKE_FIRST = f"""WITH heads AS MATERIALIZED (
    SELECT id, place, group_id FROM (
        SELECT id, place, group_id FROM {{messages}}
        WHERE queue = :queue AND state = 0 AND minus_priority = 0 AND {{nothing_due}}
        ORDER BY minus_priority, place LIMIT :limit
    ) AS m WHERE group_id IS NULL OR ({_none_of_group("2, 2 + :holds", "")}
        AND {_none_of_group("0, 1, 4", "AND f.place < m.place")})
), wanted AS MATERIALIZED (
    SELECT m.place AS head, one.* FROM heads AS m CROSS JOIN LATERAL (
        SELECT m.id, m.place, 0 AS is_delayed
        UNION ALL SELECT * FROM (SELECT * FROM (
            {_FOLLOWERS_OF_HEAD}
        ) AS found WHERE coalesce(place < {_first("place", 1)}, true) ORDER BY place LIMIT :follow) AS ordered
    ) AS one LIMIT :limit
), locked AS MATERIALIZED (
    SELECT id FROM {{messages}} WHERE id = ANY (ARRAY(SELECT id FROM wanted)) AND state + 0 IN (0, 4)
    FOR UPDATE SKIP LOCKED
), stopped AS MATERIALIZED (
    SELECT head, min(place) AS place FROM wanted
    WHERE is_delayed = 1 OR id NOT IN (SELECT id FROM locked) GROUP BY head
)
UPDATE {{messages}} SET {{take}} WHERE id = ANY ((
    SELECT CASE WHEN set_config('kmqpy.taken', count(*)::text, false) > '0' THEN array_agg(id) END
    FROM wanted LEFT JOIN stopped ON stopped.head = wanted.head
    WHERE stopped.head IS NULL OR wanted.place < stopped.place
)::bigint[])
RETURNING {{columns}}"""
_LOOK = """SELECT id, place, minus_priority, group_id FROM {messages} WHERE queue = :queue AND state = 0
ORDER BY minus_priority, place LIMIT :limit{lock_some}"""


def _of_given(column: str, state: int) -> str:
    return (
        f"(SELECT f.{column} FROM {{messages}} AS f WHERE f.group_id = given.group_id "
        f"AND {{of_group}} = {state} ORDER BY f.place LIMIT 1)"
    )


# By id: for a column that the index lacks, MariaDB may read the whole index in its order.
_SHOWN_RANK = f"(SELECT r.minus_priority FROM {{messages}} AS r WHERE r.id = {_of_given('id', 0)})"
_FIRST_BEHIND = (
    "(SELECT f.id FROM {messages} AS f WHERE f.group_id = given.group_id AND {of_group} = 4 "
    "ORDER BY f.place LIMIT 1{lock_some})"
)

_SHARED = {
    "look_grouped": _PICK,
    "behind": """SELECT id, place, CASE WHEN until_ms > {now} THEN 1 ELSE 0 END FROM {messages} AS f
WHERE group_id = :group_id AND {of_group} = 4 ORDER BY place LIMIT :limit""",
    "followers": _FOLLOWERS,
    "lock_behind": "SELECT id FROM {messages} WHERE {by_ids} AND state + 0 = 4{lock_some}",
    "lock_witnesses": "SELECT id FROM {messages} WHERE {by_ids} AND state + 0 <> 4{lock_some}",
    "rows": "SELECT {columns} FROM {messages} WHERE {by_ids}",
    "wait_behind": "UPDATE {messages} SET state = 4 WHERE {by_ids}",
    "groups_of": "SELECT DISTINCT group_id FROM {messages} WHERE {by_ids} AND group_id + 0 IS NOT NULL",
    "held_groups": """SELECT DISTINCT group_id FROM {messages}
WHERE queue = :queue AND {not_ready}state = 3 AND group_id + 0 IS NOT NULL""",
    "busy_groups": """SELECT DISTINCT group_id FROM {messages}
WHERE queue = :queue AND {not_ready}state = 2 AND group_id + 0 IS NOT NULL""",
    "left_groups": """SELECT DISTINCT group_id FROM {messages}
WHERE queue = :queue AND {not_ready}state = 4 AND group_id + 0 IS NOT NULL""",
    # The subqueries look at one entry of the index each, but for one that counts.
    "group_states": f"""SELECT given.group_id,
    (SELECT count(*) FROM {{messages}} AS f WHERE f.group_id = given.group_id AND {{of_group}} = 2) AS taken,
    {_of_given("id", 2)} AS taken_id, {_of_given("id", 0)} AS shown_id,
    {_of_given("place", 0)} AS shown_place, {_SHOWN_RANK} AS shown_rank,
    {_of_given("id", 4)} AS behind_id, {_of_given("place", 4)} AS behind_place
FROM {{given_groups}}""",
    "in_flight": """SELECT count(*) FROM (
    SELECT 1 FROM {messages} WHERE queue = :queue AND {not_ready}state = 2 LIMIT :limit
) AS taken""",
    "lock_waiting": "SELECT id FROM {messages} WHERE {by_ids} AND state + 0 IN (0, 4){lock_some}",
    "rank": """UPDATE {messages} SET state = 0, minus_priority = :rank
WHERE {by_ids} AND state + 0 IN (0, 4)""",
    "first_behind": f"SELECT {_FIRST_BEHIND} AS id FROM {{given_groups}}",
    "show": """UPDATE {messages} SET state = CASE WHEN until_ms > {now} THEN 1 ELSE 0 END,
    until_ms = CASE WHEN until_ms > {now} THEN until_ms ELSE 0 END WHERE {by_ids} AND state + 0 = 4""",
    # A key is locked, whether it is new or not, until the transaction ends.
    "claim_keys": """INSERT INTO {dedup} (queue, dedup_key, message, until_ms)
SELECT :queue, given.dedup_key, given.message, {now} + :window_ms FROM {numbered_keys}
ORDER BY given.dedup_key
ON CONFLICT (queue, dedup_key) DO UPDATE SET queue = excluded.queue
RETURNING dedup_key, message, CASE WHEN until_ms > {now} THEN 1 ELSE 0 END, {is_there},
    CASE WHEN {is_new} THEN 1 ELSE 0 END""",
    "still_there": "SELECT id FROM {messages} WHERE {by_ids} AND {is_current}{as_of_now}",
    # By the same key: an UPDATE of rows that it joins would look through all keys.
    "keep_keys": """INSERT INTO {dedup} (queue, dedup_key, message, until_ms)
SELECT :queue, given.dedup_key, given.message, {now} + :window_ms FROM {given_pairs} {or_replace}""",
    "old_keys": """SELECT d.dedup_key,
    (SELECT count(*) FROM {messages} AS m WHERE m.id = d.message)
FROM {dedup} AS d WHERE {of_queue} = :queue AND d.until_ms <= {now} AND d.message > 0
ORDER BY d.until_ms LIMIT :limit{lock_some}""",
    "prolong_keys": """UPDATE {dedup} SET until_ms = {now} + :window_ms
WHERE queue = :queue AND dedup_key {in_keys}""",
    "forget_keys": "DELETE FROM {dedup} WHERE queue = :queue AND dedup_key {in_keys}",
    "forget_all_keys": "DELETE FROM {dedup} WHERE queue = :queue",
}

_LOCK_READY = "SELECT id FROM {messages} WHERE {by_ids} AND state + 0 = 0{lock_some}"
_JSON_TABLE = "JSON_TABLE(:listed, '$[*]' COLUMNS ({columns})) AS given"
_KEY_COLUMN = "dedup_key char(22) CHARACTER SET ascii COLLATE ascii_bin PATH"
# With shares nobody waits for a delayed one.
_STRANDED = """SELECT given.group_id FROM {given_groups} WHERE (
    SELECT 1 FROM {messages} AS f WHERE f.group_id = given.group_id
    AND ({of_group} IN (0, 2) OR ({of_group} = 1 AND :shares = 0) OR ({of_group} = 3 AND :holds = 1)) LIMIT 1
) IS NULL"""
_WAITING = """SELECT group_id, minus_priority, place FROM {messages} WHERE queue = :queue AND state = 4
    AND (minus_priority > :rank OR (minus_priority = :rank AND place > :after))
ORDER BY minus_priority, place LIMIT :limit"""
# By another index.
_WAITING_POSTGRESQL = """SELECT group_id, until_ms, id FROM {messages} WHERE queue = :queue AND state = 4
    AND (until_ms, id) > (:rank, :after)
ORDER BY until_ms, id LIMIT :limit"""
_MYSQL = {
    "stranded": _STRANDED,
    "waiting": _WAITING,
    "look_shared": _LOOK,
    # It would also lock what the subqueries look at, and who ends a message would pass that over.
    "lock_ready": _LOCK_READY,
    "claim_keys": """INSERT INTO {dedup} (queue, dedup_key, message, until_ms)
SELECT :queue, given.dedup_key, 0, 0 FROM {given_keys} ORDER BY given.dedup_key
ON DUPLICATE KEY UPDATE message = {dedup}.message""",
    # A subquery would see messages that have ended since the transaction began.
    "keys": """SELECT d.dedup_key, d.message, CASE WHEN d.until_ms > {now} THEN 1 ELSE 0 END, NULL, 0
FROM {dedup} AS d WHERE d.queue = :queue AND d.dedup_key {in_keys} FOR UPDATE""",
}
_OWN: Mapping[str, Mapping[str, str]] = {
    "postgresql": {
        "stranded": _STRANDED,
        "waiting": _WAITING_POSTGRESQL,
        # By itself: a row that is locked must be seen, since nothing behind it may be taken.
        "lock_ready": _LOCK_READY,
        "look_shared": _LOOK.replace("state = 0", "state = 0 AND {nothing_due}"),
        "take_first": _TAKE_FIRST,
        # As "sync", if the take_first before it, of another transaction, has taken anything.
        "sync_taken": """SELECT id FROM {queues} WHERE id = :queue AND current_setting('kmqpy.taken') > '0'
FOR KEY SHARE""",
        "isolation": "SELECT current_setting('transaction_isolation')",
    },
    "mariadb": {
        "stranded": _STRANDED,
        "waiting": _WAITING,
        "look_shared": _LOOK,
        "lock_ready": _LOCK_READY,
        "claim_keys": """INSERT INTO {dedup} (queue, dedup_key, message, until_ms) VALUES {rows}
ON DUPLICATE KEY UPDATE queue = {dedup}.queue
RETURNING dedup_key, message, CASE WHEN until_ms > {now} THEN 1 ELSE 0 END, NULL,
    CASE WHEN message = PREVIOUS VALUE FOR {numbers} THEN 1 ELSE 0 END""",
        "key_row": "(:queue, :dedup, NEXT VALUE FOR {numbers}, {now} + :window_ms)",
    },
    "mysql": _MYSQL,
    "sqlite": {"look_shared": _LOOK.replace("state = 0", "state = 0 AND {nothing_due}")},
}
_REPLACE = """ON CONFLICT (queue, dedup_key)
DO UPDATE SET message = excluded.message, until_ms = excluded.until_ms"""
_BY_LIST = {
    "of_group": "f.state",
    "of_queue": "d.queue",
    "by_ids": "id IN :ids",
    "in_keys": "IN :keys",
    "given_groups": _JSON_TABLE.format(columns="group_id bigint PATH '$'"),
    "given_keys": _JSON_TABLE.format(columns=f"{_KEY_COLUMN} '$'"),
    "given_pairs": _JSON_TABLE.format(columns=f"{_KEY_COLUMN} '$[0]', message bigint PATH '$[1]'"),
    "or_replace": "ON DUPLICATE KEY UPDATE message = VALUES(message), until_ms = VALUES(until_ms)",
    "lock_some": " FOR UPDATE SKIP LOCKED",
    "as_of_now": " LOCK IN SHARE MODE",
}
_PARTS: Mapping[str, Mapping[str, str]] = {
    "postgresql": {
        # Not in its other indexes: with the statistics of an empty table it would look through one of those.
        "of_group": "(f.state + 0)",
        "of_queue": "(d.queue + 0)",
        "by_ids": "id = ANY (CAST(:ids AS bigint[]))",
        "in_keys": "= ANY (CAST(:keys AS text[]))",
        "given_groups": "unnest(CAST(:ids AS bigint[])) AS given(group_id)",
        "numbered_keys": """(SELECT listed.dedup_key, nextval('{numbers}') AS message
    FROM unnest(CAST(:keys AS text[])) WITH ORDINALITY AS listed(dedup_key, number) ORDER BY number
) AS given""",
        "is_new": "{dedup}.xmax = 0",  # of a row that was there, xmax is this transaction now
        "is_there": "NULL",  # it sees the messages of when it began, though it may have waited for a key
        "as_of_now": "",
        "given_pairs": "unnest(CAST(:keys AS text[]), CAST(:ids AS bigint[])) AS given(dedup_key, message)",
        "or_replace": _REPLACE,
        "lock_some": " FOR UPDATE SKIP LOCKED",
    },
    "mariadb": _BY_LIST,
    "mysql": _BY_LIST,
    "sqlite": {
        "of_group": "f.state",
        "of_queue": "d.queue",
        "by_ids": "id IN (SELECT value FROM json_each(:ids))",
        "in_keys": "IN (SELECT value FROM json_each(:keys))",
        "given_groups": "(SELECT value AS group_id FROM json_each(:ids)) AS given",
        "numbered_keys": """(SELECT value AS dedup_key, :first + key AS message FROM json_each(:keys))
AS given WHERE true""",
        "is_new": "message >= :first",
        "is_there": "(SELECT count(*) FROM {messages} AS m WHERE m.id = message AND {is_current})",
        "as_of_now": "",
        "given_pairs": """(SELECT json_extract(value, '$[0]') AS dedup_key,
    json_extract(value, '$[1]') AS message FROM json_each(:listed)) AS given WHERE true""",
        "or_replace": _REPLACE,
        "lock_some": "",
    },
}


_RETURNING = ("postgresql", "sqlite")
"""The dialects that return what they have changed."""
_RETURNING_GROUPS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(_RETURNING, ("pass_time", "finish", "purge_dead")),
    "mariadb": ("finish", "purge_dead"),  # its UPDATE returns nothing
}
"""Statements that return the groups of what they have changed."""


def group_statements(
    dialect: str, own: Mapping[str, str], *, columns: str, nothing_due: str, is_current: str, take: str
) -> dict[str, str]:
    """The statements of a dialect by name; `{…}` that all statements have are left to statements.py.

    own          the dialect's other statements
    columns      those of a message
    nothing_due  the condition that no delay or lease has ended, unless :late
    is_current   the condition of a message that is no dead letter, nor about to be one
    take         what a take sets
    """
    texts = {**_SHARED, **_OWN[dialect]}
    of_groups = _RETURNING_GROUPS.get(dialect, ())
    texts |= {f"{name}_in_groups": f"{own[name]} RETURNING group_id" for name in of_groups}
    if dialect in _RETURNING:
        found = texts["first_behind"]
        found = f"= ANY (ARRAY({found}))" if dialect == "postgresql" else f"IN ({found})"
        texts["show_first"] = texts["show"].replace("{by_ids}", f"id {found}")
        texts["take_chosen"] = f"UPDATE {{messages}} SET {take} WHERE {{by_ids}} RETURNING {{columns}}"
    if dialect == "postgresql":
        # Two statements that are sent at once: the second one has a new snapshot, and reads the groups from a
        # setting of the transaction.
        texts["finish_naming_groups"] = f"""WITH gone AS ({texts["finish_in_groups"]})
SELECT count(*), set_config('kmqpy.groups', coalesce(
    array_agg(DISTINCT group_id) FILTER (WHERE group_id IS NOT NULL), '{{}}')::text, true) FROM gone"""
        groups = "CAST(current_setting('kmqpy.groups') AS bigint[])"
        shown = texts["show_first"].replace("CAST(:ids AS bigint[])", groups)
        texts["show_first_named"] = (
            shown.replace("{given_groups}", f"unnest({groups}) AS given(group_id)") + " RETURNING id"
        )
    shared = f"UPDATE {{messages}} SET {take}, minus_priority = 0 WHERE {{by_ids}}"
    texts["take_shared"] = shared + (" RETURNING {columns}" if dialect in _RETURNING else "")
    for name, text in texts.items():
        filled = text.replace("{columns}", columns).replace("{nothing_due}", nothing_due)
        filled = filled.replace("{take}", take)
        for part, value in _PARTS[dialect].items():
            filled = filled.replace(f"{{{part}}}", value)
        texts[name] = filled.replace("{is_current}", is_current)
    return texts
