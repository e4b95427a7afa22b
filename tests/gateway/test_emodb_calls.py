"""Every row of both tables of EmoDB's interface: statuses, bodies, headers, order of checks, keys."""

import itertools
import json
import logging
import re
from collections.abc import Iterator

import pytest
from emodb_answers import (
    BAD_NAME,
    ILLEGAL,
    SUCCESS,
    assert_answers,
    assert_illegal,
    get,
    post,
)
from gateway_support import DEDUP, QUEUE, Served, fresh_memory, running
from wire import Wire

from kmqpy.core.clock import wait_until
from kmqpy.gateway.keys.keyring import new_key
from kmqpy.gateway.keys.stores import FileKeys
from kmqpy.testing import ManualClock, memory_storage

UNAUTHORIZED = "com.bazaarvoice.emodb.common.api.UnauthorizedException"
UNKNOWN_MOVE = "com.bazaarvoice.emodb.queue.api.UnknownMoveException"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with running(fresh_memory()) as found:
        yield found


# --- the first table --------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [QUEUE, DEDUP])
def test_every_call_answers_exactly_so(wire, name, base):
    queue = f"{base}/{name}"
    assert_answers(get(wire, f"{queue}/poll"), b"[]")
    assert_answers(get(wire, f"{queue}/peek"), b"[]")
    for call in ("size", "uncached_size", "claimcount"):
        assert_answers(get(wire, f"{queue}/{call}"), b"0")
    for call in ("unclaimall", "ack", "renew"):
        assert_answers(post(wire, f"{queue}/{call}", *([[]] if call != "unclaimall" else [])), SUCCESS)
    assert_answers(get(wire, queue, method="DELETE"), SUCCESS)
    assert_answers(post(wire, f"{queue}/sendbatch", []), SUCCESS)
    assert_answers(post(wire, f"{queue}/send", b' { "a" : [1.50 , 2e400 ] , "a": "\\u00e9" } '), SUCCESS)
    sent = b'{"a":[1.50,2e400],"a":"\\u00e9"}'
    peeked = get(wire, f"{queue}/peek")
    (shown,) = re.findall(rb'\[\{"id":"([0-9a-f]{40})","payload":(.*)\}\]', peeked.body)
    assert shown[1] == sent
    assert_answers(peeked, b'[{"id":"%s","payload":%s}]' % shown)
    assert_answers(get(wire, f"{queue}/poll"), peeked.body)
    for call in ("size", "size?limit=1", "uncached_size", "claimcount"):
        assert_answers(get(wire, f"{queue}/{call}"), b"1")
    ids = json.dumps([shown[0].decode()]).encode()
    assert_answers(post(wire, f"{queue}/renew", ids), SUCCESS)
    assert_answers(post(wire, f"{queue}/unclaimall"), SUCCESS)
    assert_answers(get(wire, f"{queue}/claimcount"), b"0")
    assert_answers(post(wire, f"{queue}/ack", ids), SUCCESS)
    assert_answers(get(wire, f"{queue}/size"), b"0")
    batch = f'{{"{name}":[1],"{name}-2":[2, 3],"{name}-3":[]}}'.encode()
    assert_answers(post(wire, f"{base}/_sendbatch", batch), SUCCESS)
    assert_answers(get(wire, f"{base}/{name}-2/size"), b"2")
    assert_answers(post(wire, f"{base}/_sendbatch", b"{}"), SUCCESS)
    moved = post(wire, f"{base}/_move?from={name}&to={name}-2")
    reference = moved.json["id"]
    assert_answers(moved, b'{"id":"%s"}' % reference.encode())
    text = '{"from":"%s","to":"%s-2","status":"%s"}'

    def is_complete():
        status = get(wire, f"{base}/_move/{reference}")
        assert_answers(status, (text % (name, name, status.json["status"])).encode())
        return status.json["status"] == "COMPLETE"

    assert wait_until(is_complete, 20, every_s=0.01)
    assert_answers(get(wire, f"{queue}/size"), b"0")


def test_ping_needs_no_key(wire, tmp_path):
    pong = get(wire, f"{QUEUE}/ping")
    assert (pong.status, pong.body, pong.headers["content-type"]) == (200, b"pong", "text/plain")
    with keyed(tmp_path) as (port, _), Wire(port) as other:
        assert get(other, f"{DEDUP}/ping").body == b"pong"


@pytest.mark.parametrize("call", ["poll", "peek"])
@pytest.mark.parametrize(
    ("limit", "text"),
    [
        ("0", "Limit must be >0"),
        ("-1", "Limit must be >0"),
        ("-2147483648", "Limit must be >0"),
        ("1001", "Limit must be <=1000"),
        ("2147483647", "Limit must be <=1000"),
    ],
)
def test_limits_out_of_range_are_refused(wire, name, call, limit, text):
    assert_illegal(get(wire, f"{QUEUE}/{name}/{call}?limit={limit}"), text)


def test_limits_are_kept_and_have_defaults(wire, name):
    post(wire, f"{QUEUE}/{name}/sendbatch", [*range(1_005)])
    for limit, count in (
        ("", 10),
        ("limit=1", 1),
        ("limit=%2B7", 7),
        ("limit=007", 7),
        ("limit=1000", 1_000),
    ):
        assert len(get(wire, f"{QUEUE}/{name}/peek?{limit}").json) == count
    assert len(get(wire, f"{QUEUE}/{name}/poll").json) == 10
    assert len(get(wire, f"{QUEUE}/{name}/poll?limit=1000").json) == 995
    for limit in ("", "?limit=1", "?limit=9223372036854775807"):
        assert get(wire, f"{QUEUE}/{name}/size{limit}").json == 1_005
    for limit in (0, -1, -(2**63)):
        assert_illegal(get(wire, f"{QUEUE}/{name}/size?limit={limit}"), "Limit must be >0")


@pytest.mark.parametrize(
    ("call", "parameter", "bits"),
    [("poll", "limit", 32), ("peek", "limit", 32), ("size", "limit", 64), ("poll", "ttl", 32)],
)
def test_what_is_not_a_number_is_refused(wire, name, call, parameter, bits):
    too_large, too_small = 2 ** (bits - 1), -(2 ** (bits - 1)) - 1
    for given, text in (
        ("abc", "abc"), ("", ""), ("1.0", "1.0"), ("1e2", "1e2"), ("%201", " 1"), ("0x1", "0x1"),
        ("%2B", "+"),
        ("1_0", "1_0"), ("%D9%A1", "\u0661"), (f"{too_large}", f"{too_large}"),
        (f"{too_small}", f"{too_small}"), ("9" * 5_000, "9" * 5_000),
    ):  # fmt: skip
        answer = get(wire, f"{QUEUE}/{name}/{call}?{parameter}={given}")
        assert (answer.status, answer.body.decode()) == (400, f'"{text}" is not a number.')
        assert answer.headers["content-type"] == "text/plain"
        assert answer.exception is None


def test_times_out_of_range_are_refused(wire, name):
    for ttl, text in (("-1", "ClaimTtl must be >=0"), ("3601", "ClaimTtl must be <=1 hour")):
        assert_illegal(get(wire, f"{QUEUE}/{name}/poll?ttl={ttl}"), text)
        assert_illegal(post(wire, f"{QUEUE}/{name}/renew?ttl={ttl}", []), text)
        # Before the ids, and those before the empty list.
        assert_illegal(post(wire, f"{QUEUE}/{name}/renew?ttl={ttl}", ["bad"]), text)
    for ttl in ("0", "1", "3600"):
        assert_answers(get(wire, f"{QUEUE}/{name}/poll?ttl={ttl}"), b"[]")
        assert_answers(post(wire, f"{QUEUE}/{name}/renew?ttl={ttl}", []), SUCCESS)
    answer = post(wire, f"{QUEUE}/{name}/renew?ttl=abc", ["bad"])
    assert (answer.status, answer.body) == (400, b'"abc" is not a number.')


def test_claims_last_as_long_as_asked(name):
    clock = ManualClock()
    with running(memory_storage(clock)) as served, Wire(served.gateway.port) as wire:
        queue = f"{QUEUE}/{name}"
        post(wire, f"{queue}/send", 1)
        messages = get(wire, f"{queue}/peek").json
        ids = [messages[0]["id"]]
        for query, seconds in (("", 30), ("?ttl=3600", 3_600), ("?ttl=1", 1)):
            assert get(wire, f"{queue}/poll{query}").json == messages
            clock.advance(seconds - 0.1)
            assert get(wire, f"{queue}/poll").json == []
            clock.advance(0.2)
            assert get(wire, f"{queue}/poll?ttl=1").json == messages
            clock.advance(1.1)
            assert_answers(post(wire, f"{queue}/renew{query}", ids), SUCCESS)  # claims anew
            clock.advance(seconds - 0.1)
            assert get(wire, f"{queue}/poll").json == []
            clock.advance(0.2)
            assert get(wire, f"{queue}/poll?ttl=60").json == messages
            assert_answers(post(wire, f"{queue}/renew{query}", ids), SUCCESS)
            clock.advance(max(seconds, 60) - 0.1)  # the later end counts
            assert get(wire, f"{queue}/poll").json == []
            assert_answers(post(wire, f"{queue}/renew?ttl=0", ids), SUCCESS)


def test_other_parameters_are_ignored_and_the_first_of_a_name_counts(wire, name):
    post(wire, f"{QUEUE}/{name}/sendbatch?partitioned=true&x", [1, 2, 3])
    path = f"{QUEUE}/{name}/poll?partitioned=false&limit=2&limit=abc&=&&%00=%FF&{'a=1&' * 300}ttl=60"
    assert len(get(wire, path).json) == 2
    assert_answers(get(wire, f"{QUEUE}/{name}/uncached_size?limit=abc"), b"3")
    assert_answers(get(wire, f"{QUEUE}/{name}/claimcount?limit=0"), b"2")


# --- names and paths --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "UPPER", "a%2Fb", "%2F", "..%2F", "%2E%2E", "%2E", "_one", "_", "a%20b", "%E2%82%AC", "%FF", "a+b",
        "a%00", "x" * 256, "%C3%A9", "a%0Ab", "a%0D%0Ab", "a%zz", "a%", "a~b", "a%25", "%F0%9F%98%80", "a,b",
        "a;b=c", "a*",
    ],
)  # fmt: skip
def test_bad_names_are_refused(wire, name):
    for answer in (
        post(wire, f"{QUEUE}/{name}/send", 1),
        post(wire, f"{QUEUE}/{name}/sendbatch", [1]),
        get(wire, f"{QUEUE}/{name}/poll"),
        get(wire, f"{QUEUE}/{name}/size"),
        get(wire, f"{QUEUE}/{name}", method="DELETE"),
        post(wire, f"{QUEUE}/_move?from={name}&to=good"),
        post(wire, f"{QUEUE}/_move?from=good&to={name}"),
    ):
        assert_illegal(answer, BAD_NAME)


def test_an_empty_name_is_refused(wire):
    for answer in (post(wire, f"{QUEUE}//send", 1), get(wire, f"{QUEUE}//poll"), get(wire, f"{QUEUE}//size")):
        assert_illegal(answer, BAD_NAME)


@pytest.mark.parametrize(
    ("path", "same"),
    [
        ("a:b@c-_.", "a%3Ab%40c%2D%5F%2E"),
        ("__system", "%5F_system"),
        ("...", "%2e.."),
        ("poll", "pol%6C"),
        ("ping", "ping"),
        ("x" * 255, "%78" + "x" * 254),
    ],
)
def test_names_are_unescaped(wire, path, same):
    assert_answers(post(wire, f"{QUEUE}/{path}/send", 1), SUCCESS)
    assert get(wire, f"{QUEUE}/{same}/size").json == 1
    get(wire, f"{QUEUE}/{path}", method="DELETE")


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/queue/1", "GET", 404),
        ("/queue/1/", "GET", 404),
        ("/queue/1/q/unknown", "GET", 404),
        ("/queue/1/q/send/more", "POST", 404),
        ("/queue/2/q/send", "POST", 404),
        ("/", "GET", 303),  # to the console
        ("/", "POST", 404),
        ("/queue/1/q", "GET", 405),
        ("/queue/1/q", "POST", 405),
        ("/queue/1/q/send", "GET", 405),
        ("/queue/1/q/poll", "POST", 405),
        ("/queue/1/q/poll", "PUT", 405),
        ("/queue/1/_sendbatch", "GET", 405),
        ("/queue/1/_move", "GET", 405),
        ("/queue/1/_move/x", "POST", 405),
        ("/queue/1/q/ack", "BREW", 400),
    ],
)
def test_other_paths_and_methods_are_refused(served, path, method, status):
    with Wire(served.gateway.port) as wire:
        answer = wire.ask(f"{method} {path} HTTP/1.1\r\nContent-Length: 0\r\nContent-Type: text/plain")
    assert answer.status == status
    assert answer.exception is None
    assert ("allow" in answer.headers) is (status == 405)
    if status == 405:
        assert answer.json["message"] == f"{method} does nothing here; use {answer.headers['allow']}"
    if status == 404:
        assert answer.json["message"].startswith("no such path; ")


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/queue/1/q/size", "GET, HEAD, OPTIONS"),
        ("/queue/1/q/peek", "GET, HEAD, OPTIONS"),
        ("/queue/1/q/poll", "GET, OPTIONS"),  # it takes messages
        ("/queue/1/q/send", "POST, OPTIONS"),
        ("/queue/1/q", "DELETE, OPTIONS"),
        ("/queue/1/ping", "GET, HEAD, OPTIONS"),
    ],
)
def test_head_and_options_are_answered_as_servers_do(served, path, allowed):
    with Wire(served.gateway.port) as wire:
        for end in ("", "/"):
            options = wire.ask(f"OPTIONS {path}{end} HTTP/1.1")
            assert (options.status, options.headers["allow"], options.body) == (204, allowed, b"")
            if "HEAD" in allowed:
                shown = wire.ask(f"GET {path}{end} HTTP/1.1")
                assert shown.status == wire.ask(f"HEAD {path}{end} HTTP/1.1").status == 200
    with Wire(served.gateway.admin_port) as wire:
        for admin in ("/healthcheck", "/readyz", "/livez", "/ping", "/metrics"):
            options = wire.ask(f"OPTIONS {admin}/ HTTP/1.1")
            assert (options.status, options.headers["allow"]) == (204, "GET, HEAD, OPTIONS")
            assert wire.ask(f"GET {admin}/ HTTP/1.1").status == 200
        assert wire.ask("GET /nothing/ HTTP/1.1").status == 404


# --- ids --------------------------------------------------------------------------------------------------


def test_ids_of_other_queues_and_damaged_ones_do_nothing_of_the_call(wire, name):
    post(wire, f"{QUEUE}/{name}/sendbatch", [1, 2])
    post(wire, f"{QUEUE}/{name}-2/send", 1)
    post(wire, f"{DEDUP}/{name}/send", 1)
    own, _ = (one["id"] for one in get(wire, f"{QUEUE}/{name}/poll").json)
    elsewhere = [get(wire, f"{path}/poll").json[0]["id"] for path in (f"{QUEUE}/{name}-2", f"{DEDUP}/{name}")]
    damaged = [
        own[:-1] + ("0" if own[-1] != "0" else "1"),
        ("0" if own[0] != "0" else "1") + own[1:],
        "0" * 40,
    ]
    for call in ("ack", "renew?ttl=0", "renew"):
        for bad in (*elsewhere, *damaged):
            assert_illegal(post(wire, f"{QUEUE}/{name}/{call}", [own, bad]), "Invalid event ID checksum.")
        for bad in (
            "",
            "0",
            "xyz",
            own[:-2],
            own + "00",
            own[:20],
            "\u00e9" * 40,
            " " * 40,
            own + " ",
            1,
            None,
            {},
            [],
        ):
            answer = post(wire, f"{QUEUE}/{name}/{call}", [own, bad])
            assert (answer.status, answer.exception) == (400, ILLEGAL)
            assert answer.body in {b"Invalid event ID.", b"Invalid event ID checksum."}
    assert get(wire, f"{QUEUE}/{name}/claimcount").json == 2
    assert get(wire, f"{QUEUE}/{name}/size").json == 2
    # Of a queue that does not exist they are as bad.
    assert_illegal(post(wire, f"{QUEUE}/{name}-3/ack", [own]), "Invalid event ID checksum.")


def test_acknowledged_purged_and_repeated_ids_are_fine(wire, name):
    post(wire, f"{QUEUE}/{name}/sendbatch", [1, 2, 3])
    ids = [one["id"] for one in get(wire, f"{QUEUE}/{name}/poll").json]
    assert_answers(post(wire, f"{QUEUE}/{name}/ack", [ids[0]] * 3), SUCCESS)
    assert_answers(post(wire, f"{QUEUE}/{name}/ack", ids[:2]), SUCCESS)
    get(wire, f"{QUEUE}/{name}", method="DELETE")
    for call in ("ack", "renew", "renew?ttl=0"):
        assert_answers(post(wire, f"{QUEUE}/{name}/{call}", ids), SUCCESS)
    assert get(wire, f"{QUEUE}/{name}/claimcount").json == 0


# --- moves ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [QUEUE, DEDUP])
def test_wrong_moves_are_refused(wire, name, base):
    for query, text in (
        ("", "from is required"),
        ("?to=a", "from is required"),
        ("?from=&to=a", "from is required"),
        ("?from=a", "to is required"),
        ("?from=a&to=", "to is required"),
        (f"?from={name}&to={name}", "cannot move queue to itself"),
    ):
        assert_illegal(post(wire, f"{base}/_move{query}"), text)
    reference = post(wire, f"{base}/_move?from={name}&to={name}-2").json["id"]
    other = DEDUP if base == QUEUE else QUEUE
    for path, shown in (
        (f"{other}/_move/{reference}", reference),
        (f"{base}/_move/x", "x"),
        (f"{base}/_move/{'0' * 40}", "0" * 40),
        (f"{base}/_move/a%2Fb%22", 'a/b"'),
    ):
        answer = get(wire, path)
        assert (answer.status, answer.exception) == (404, UNKNOWN_MOVE)
        assert answer.json == {"id": shown}


@pytest.mark.parametrize(("origin", "target"), [("a", "a"), ("a", "orders:a"), ("orders:a", "a")])
def test_no_queue_is_moved_to_itself_whatever_it_is_called(origin, target):
    with running(fresh_memory(), name="orders") as served:
        answer = served.ask("POST", f"/queue/1/_move?from={origin}&to={target}")
        assert (answer.status, answer.body) == (400, b"cannot move queue to itself")


# --- keys -------------------------------------------------------------------------------------------------


class keyed:  # noqa: N801
    """A gateway that asks for keys; gives its port, and the secrets by role or permission."""

    def __init__(self, folder, *permissions):
        self._keys = FileKeys(folder / "keys")
        self.secrets = {}
        roles = ("queue_post", "queue_poll", "queue_standard", "queue_admin")
        for title in (*roles, *permissions):
            is_role = title in roles
            key, secret = new_key(title, [title] if is_role else [], [] if is_role else [title])
            self._keys.put(key)
            self.secrets[title] = secret

    def __enter__(self):
        self._running = running(fresh_memory(), self._keys)
        return self._running.__enter__().gateway.port, self.secrets

    def __exit__(self, *what):
        self._running.__exit__(*what)


def assert_forbidden(answer):
    assert (answer.status, answer.body, answer.exception) == (
        403,
        b'{"reason":"not authorized"}',
        UNAUTHORIZED,
    )
    assert answer.headers["content-type"] == "application/json"


def test_keys_come_in_a_header_or_a_parameter(tmp_path, name, caplog):
    caplog.set_level(logging.DEBUG)
    with keyed(tmp_path) as (port, secrets), Wire(port) as wire:
        secret = secrets["queue_standard"]
        good = f"X-BV-API-Key: {secret}"
        path = f"{QUEUE}/{name}/size"
        for query, *headers in (
            ("", good), ("", good.lower().replace(secret.lower(), secret)), (f"?APIKey={secret}",),
            (f"?APIKey={secret}", "X-BV-API-Key:"), ("?APIKey=wrong", good),
        ):  # fmt: skip
            assert_answers(get(wire, path + query, *headers), b"0")
        for query, *headers in (
            ("",), ("?APIKey=",), ("", "X-BV-API-Key: wrong"), (f"?APIKey={secret}", "X-BV-API-Key: wrong"),
            (f"?apikey={secret}",), ("", f"X-BV-API-Key: {secret}x"), ("", "X-BV-API-Key: \xff\xfe"),
            ("?APIKey=%ED%A0%80",), ("", f"Authorization: Bearer {secret}"),
        ):  # fmt: skip
            assert_forbidden(get(wire, path + query, *headers))
        assert_answers(post(wire, f"{QUEUE}/{name}/send?APIKey={secret}", {"secret": "payload-x"}), SUCCESS)
        text = json.dumps(
            [{**vars(record), "args": str(record.args)} for record in caplog.records], default=str
        )
        assert '"status": 403' in text
        assert secret not in text
        assert "payload-x" not in text


def test_checks_come_in_their_order(tmp_path, name):
    with keyed(tmp_path) as (port, secrets), Wire(port) as wire:
        good = f"X-BV-API-Key: {secrets['queue_admin']}"
        # Method, before type and key.
        assert get(wire, f"{QUEUE}/{name}/send").status == 405
        assert post(wire, f"{QUEUE}/{name}/nothing", b"x", kind="Content-Type: text/plain").status == 404
        # Type, before the key.
        assert post(wire, f"{QUEUE}/{name}/send", b"{", kind="Content-Type: text/plain").status == 415
        # The key and its permission, before any value.
        assert_forbidden(post(wire, f"{QUEUE}/BAD/send", b"{"))
        assert_forbidden(get(wire, f"{QUEUE}/BAD/poll?limit=abc&ttl=-1"))
        assert_forbidden(post(wire, f"{QUEUE}/{name}/renew?ttl=abc", b"{"))
        assert_forbidden(post(wire, f"{QUEUE}/_sendbatch", b"{"))
        assert_forbidden(post(wire, f"{QUEUE}/_move"))
        assert_forbidden(get(wire, f"{QUEUE}/_move/x"))
        poller = f"X-BV-API-Key: {secrets['queue_poll']}"
        assert_forbidden(post(wire, f"{QUEUE}/BAD/send", b"{", poller))
        # Values: the name first.
        assert_illegal(get(wire, f"{QUEUE}/BAD/poll?limit=0", good), BAD_NAME)


def test_a_batch_that_is_refused_names_the_first_queue_and_sends_nothing(tmp_path, name):
    with keyed(tmp_path, f"queue|post|{name}*") as (port, secrets), Wire(port) as wire:
        mine, admin = (f"X-BV-API-Key: {secrets[one]}" for one in (f"queue|post|{name}*", "queue_admin"))
        batch = {f"{name}-1": [1], "other": [2], "third": [3]}
        assert_answers(post(wire, f"{QUEUE}/_sendbatch", batch, mine), b'{"queue":"other"}', 403)
        assert get(wire, f"{QUEUE}/{name}-1/size", admin).json == 0
        assert_answers(post(wire, f"{QUEUE}/_sendbatch", {f"{name}-1": [1]}, mine), SUCCESS)
        assert get(wire, f"{QUEUE}/{name}-1/size", admin).json == 1


NEEDS = {
    ("POST", "send", b"1"): "post",
    ("POST", "sendbatch", b"[1]"): "post",
    ("GET", "size", None): "get_status",
    ("GET", "uncached_size", None): "get_status",
    ("GET", "claimcount", None): "get_status",
    ("GET", "peek", None): "poll",
    ("GET", "poll", None): "poll",
    ("POST", "renew", b"IDS"): "poll",
    ("POST", "ack", b"IDS"): "poll",
    ("POST", "unclaimall", None): "poll",
    ("DELETE", "", None): "poll",
}
ALLOWED = {
    "queue_post": {"post", "get_status"},
    "queue_poll": {"poll", "get_status"},
    "queue_standard": {"post", "poll", "get_status"},
    "queue_admin": {"post", "poll", "get_status"},
}


def test_which_role_may_do_what_and_403_changes_nothing(tmp_path):
    with keyed(tmp_path) as (port, secrets), Wire(port) as wire:
        admin = f"X-BV-API-Key: {secrets['queue_admin']}"

        def state(queue):
            shown = get(wire, f"{queue}/peek", admin).json
            return shown, get(wire, f"{queue}/claimcount", admin).json

        cases = itertools.product((QUEUE, DEDUP), ("", "__"), NEEDS, ALLOWED)
        for number, (base, prefix, (method, call, body), role) in enumerate(cases):
            queue = f"{base}/{prefix}m-{number}"
            post(wire, f"{queue}/sendbatch", ["a", "b"], admin)
            (claimed,) = get(wire, f"{queue}/poll?limit=1", admin).json
            before = state(queue)
            content = None if body is None else body.replace(b"IDS", json.dumps([claimed["id"]]).encode())
            path = f"{queue}/{call}" if call else queue
            key = f"X-BV-API-Key: {secrets[role]}"
            answer = (
                post(wire, path, content, key) if method == "POST" else get(wire, path, key, method=method)
            )
            may = NEEDS[method, call, body] in ALLOWED[role] and (not prefix or role == "queue_admin")
            assert answer.status == (200 if may else 403), (queue, call, role)
            if not may:
                assert_forbidden(answer)
                assert state(queue) == before


def test_moving_needs_poll_and_post(tmp_path, name):
    with keyed(tmp_path) as (port, secrets), Wire(port) as wire:
        for role, prefix in itertools.product(ALLOWED, ("", "__")):
            key = f"X-BV-API-Key: {secrets[role]}"
            answer = post(wire, f"{QUEUE}/_move?from={prefix}{name}&to={name}-2", None, key)
            may = {"poll", "post"} <= ALLOWED[role] and (not prefix or role == "queue_admin")
            assert answer.status == (200 if may else 403)
            if may:
                poller = f"X-BV-API-Key: {secrets['queue_poll']}"  # any valid key may ask for its status
                assert get(wire, f"{QUEUE}/_move/{answer.json['id']}", poller).status == 200
