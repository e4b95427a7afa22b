"""Every row of both tables of EmoDB's interface, byte by byte: statuses, bodies, headers, order of checks."""

import itertools
import json
import logging
import re
import time
import tracemalloc
import uuid
from collections.abc import Iterator

import pytest
from gateway_support import DEDUP, QUEUE, Served, fresh_memory, running
from wire import Wire, chunks, gzipped

from kmqpy.core.clock import wait_until
from kmqpy.gateway.keys.keyring import new_key
from kmqpy.gateway.keys.stores import FileKeys
from kmqpy.gateway.limits import Limits
from kmqpy.testing import ManualClock, memory_storage

ILLEGAL = "java.lang.IllegalArgumentException"
UNAUTHORIZED = "com.bazaarvoice.emodb.common.api.UnauthorizedException"
UNAVAILABLE = "com.bazaarvoice.emodb.common.api.ServiceUnavailableException"
UNKNOWN_MOVE = "com.bazaarvoice.emodb.queue.api.UnknownMoveException"
SUCCESS = b'{"success":true}'
JSON = "Content-Type: application/json"
SEND_HEAD = f"POST {QUEUE}/no-http/send HTTP/1.1\r\nHost: localhost\r\n{JSON}\r\n".encode()
BAD_NAME = (
    "Queue name must be a lowercase ASCII string between 1 and 255 characters in length. Allowed punctuation "
    "characters are -.:@_ and the queue name may not start with a single underscore character. An example of "
    "a valid table name would be 'polloi:provision'."
)
MAX_MESSAGE = 64 * 1024
MAX_BODY = 256 * 1024


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    limits = Limits(max_message_bytes=MAX_MESSAGE, max_body_bytes=MAX_BODY, body_timeout_s=0.5)
    with running(fresh_memory(), limits=limits) as found:
        yield found


@pytest.fixture(scope="module", autouse=True)
def idle(served: Served) -> Iterator[tuple[Wire, float]]:
    """A connection that was used once, when the tests of this module began."""
    with Wire(served.gateway.port) as wire:
        assert wire.ask(f"GET {QUEUE}/ping HTTP/1.1").body == b"pong"
        yield wire, time.monotonic()


@pytest.fixture
def wire(served: Served) -> Iterator[Wire]:
    with Wire(served.gateway.port) as found:
        yield found


@pytest.fixture
def name() -> str:
    return f"h-{uuid.uuid4().hex[:12]}"


def post(wire, path, body=None, *headers, kind=JSON):
    """POST a body with its length; `body` is JSON, or bytes as they are; None: none, and no type."""
    if body is None:
        return wire.ask("\r\n".join([f"POST {path} HTTP/1.1", "Content-Length: 0", *headers]))
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", f"Content-Length: {len(content)}", *([kind] if kind else []), *headers]
    return wire.ask("\r\n".join(head), content)


def get(wire, path, *headers, method="GET"):
    return wire.ask("\r\n".join([f"{method} {path} HTTP/1.1", *headers]))


def assert_answers(answer, body, status=200):
    """The body byte by byte, its type exactly, and neither an exception nor a redirection."""
    assert (answer.status, answer.body) == (status, body)
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["content-length"] == str(len(body))
    assert answer.exception is None
    assert "location" not in answer.headers


def assert_illegal(answer, text):
    assert (answer.status, answer.body.decode(), answer.exception) == (400, text, ILLEGAL)
    assert answer.headers["content-type"] == "text/plain"


def assert_no_json(answer):
    """Malformed, or the wrong kind of JSON."""
    assert (answer.status, answer.exception) == (400, None)
    assert answer.json.keys() == {"message"}


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
def test_limits_out_of_range(wire, name, call, limit, text):
    assert_illegal(get(wire, f"{QUEUE}/{name}/{call}?limit={limit}"), text)


def test_limits_and_their_defaults(wire, name):
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
def test_what_is_no_number(wire, name, call, parameter, bits):
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


def test_times_out_of_range(wire, name):
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


def test_how_long_claims_last(name):
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
def test_bad_names(wire, name):
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


def test_an_empty_name(wire):
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
def test_other_paths_and_methods(served, path, method, status):
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


# --- bodies -----------------------------------------------------------------------------------------------


def sent(wire, name):
    """The payloads that are in the queue, which is emptied."""
    found = [one["payload"] for one in get(wire, f"{QUEUE}/{name}/peek?limit=1000").json]
    get(wire, f"{QUEUE}/{name}", method="DELETE")
    return found


@pytest.mark.parametrize(
    "body",
    [b"null", b"true", b"0", b"-0.0", b"1e400", b"123456789012345678901234567890", b'""', b"[]", b"{}",
     b'{"a":1,"a":2}', b'"\\ud83d\\ude00"', b'"\xf0\x9f\x98\x80\xe2\x80\xa8"', b"[" * 500 + b"]" * 500],
)  # fmt: skip
@pytest.mark.parametrize("base", [QUEUE, DEDUP])
def test_any_json_comes_back_as_it_was(wire, name, body, base):
    assert_answers(post(wire, f"{base}/{name}/send", b" \t\r\n" + body + b"\n "), SUCCESS)
    assert_answers(post(wire, f"{base}/{name}/sendbatch", b"[ %s ]" % body), SUCCESS)
    assert_answers(post(wire, f"{base}/_sendbatch", b'{"%s":[%s]}' % (name.encode(), body)), SUCCESS)
    shown = get(wire, f"{base}/{name}/peek").body
    assert shown.count(b'"payload":' + body + b"}") == 3


def test_an_empty_body_is_null(wire, name):
    assert_answers(post(wire, f"{QUEUE}/{name}/send", b""), SUCCESS)
    assert_answers(post(wire, f"{QUEUE}/{name}/send"), SUCCESS)  # without a type, too
    assert sent(wire, name) == [None, None]
    for call in ("ack", "renew"):
        assert_illegal(post(wire, f"{QUEUE}/{name}/{call}", b""), "Missing message Ids")
        assert_illegal(post(wire, f"{QUEUE}/{name}/{call}", b"null"), "Missing message Ids")


@pytest.mark.parametrize(
    "body",
    [b"{", b"[1", b"1 2", b"NaN", b"'a'", b"{a:1}", b"[1,]", b"\xef\xbb\xbf1", b'"\xff"', b'["\xff"]',
     b'"\n"',
     b"01", b'{"a":"\xed\xa0\x80"}', b'"\\ud800"', b"tru", b"\x00", b'"\\x"', b"// a\n1", b"[" * 100_000],
)  # fmt: skip
def test_malformed_json(wire, name, body):
    for call in ("send", "sendbatch", "ack", "renew"):
        assert_no_json(post(wire, f"{QUEUE}/{name}/{call}", body))
    assert_no_json(post(wire, f"{QUEUE}/_sendbatch", body))
    assert sent(wire, name) == []


def test_the_wrong_kind_of_json(wire, name):
    for body in (1, "a", {}, True):
        for call in ("sendbatch", "ack", "renew"):
            assert_no_json(post(wire, f"{QUEUE}/{name}/{call}", body))
    for body in (b"1", b"[]", b'{"a":1}', b'{"a":{}}', b"null", b'{"a":null}', b""):
        assert_no_json(post(wire, f"{QUEUE}/_sendbatch", body))
    assert_no_json(post(wire, f"{QUEUE}/{name}/sendbatch", b"null"))


def test_the_largest_message(wire, name):
    largest = b'"' + b"x" * (MAX_MESSAGE - 2) + b'"'
    assert_answers(post(wire, f"{QUEUE}/{name}/send", largest + b" " * 1_000), SUCCESS)
    text = (
        f"Message size ({MAX_MESSAGE + 1}) is greater than the maximum allowed ({MAX_MESSAGE}) message size"
    )
    too_large = largest[:-1] + b'y"'
    assert_illegal(post(wire, f"{QUEUE}/{name}/send", too_large), text)
    assert_illegal(post(wire, f"{QUEUE}/{name}/sendbatch", b"[1,%s]" % too_large), text)
    batch = b'{"%s":[1],"%s-2":[%s]}' % (name.encode(), name.encode(), too_large)
    assert_illegal(post(wire, f"{QUEUE}/_sendbatch", batch), text)
    assert len(sent(wire, name)) == 1


def test_all_names_of_a_batch_are_checked_before_the_first_send(wire, name):
    batch = b'{"%s":[1],"BAD":[]}' % name.encode()
    assert_illegal(post(wire, f"{QUEUE}/_sendbatch", batch), BAD_NAME)
    assert sent(wire, name) == []


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("application/json;charset=utf-8", 200),
        ("Application/JSON ; q=1", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("application/jsonp", 415),
        ("", 415),
    ],
)
def test_content_types(wire, name, kind, status):
    header = f"Content-Type: {kind}"
    for path, body in (
        (f"{name}/send", b"1"),
        (f"{name}/sendbatch", b"[]"),
        ("_sendbatch", b"{}"),
        (f"{name}/ack", b"[]"),
        (f"{name}/renew", b"[]"),
    ):
        answer = post(wire, f"{QUEUE}/{path}", body, kind=header)
        assert (answer.status, answer.exception) == (status, None)
        if status == 415:
            assert (answer.body, answer.headers["accept-post"]) == (b"", "application/json")
            assert "Content-Type: application/json" in answer.headers["x-kmq-note"]
    # Calls without a body have no type that could be wrong.
    for path in (f"{name}/unclaimall", f"_move?from={name}&to={name}-2"):
        assert post(wire, f"{QUEUE}/{path}", b"", kind=header).status == 200
        assert post(wire, f"{QUEUE}/{path}", b"x", kind=header).status == 200
    assert post(wire, f"{QUEUE}/{name}/send", b"1", kind="").status == 415


# --- how bodies come --------------------------------------------------------------------------------------


def chunked(wire, path, pieces, *headers):
    head = [f"POST {path} HTTP/1.1", "Transfer-Encoding: chunked", JSON, *headers]
    return wire.ask("\r\n".join(head), *pieces)


def test_chunked_bodies(wire, name):
    path = f"{QUEUE}/{name}/send"
    assert_answers(chunked(wire, path, chunks(b"[1", b",2", b"]")), SUCCESS)
    assert_answers(chunked(wire, path, [*b"".join(chunks(b'{"a"', b":3}")).partition(b":")]), SUCCESS)
    assert_answers(chunked(wire, path, [b"1;x=y\r\n4\r\n0\r\nTrailer: x\r\n\r\n"]), SUCCESS)
    assert_answers(chunked(wire, path, [b"1\r\n5\r\n0\r\nOrigin: http://a\r\nHost: b\r\n\r\n"]), SUCCESS)
    wire.send(f"POST {path} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
    wire.send(f"1\r\n6\r\n0\r\n{JSON}\r\n\r\n".encode())
    assert wire.answer("POST").status == 415  # a trailer is no header
    assert_answers(chunked(wire, path, chunks()), SUCCESS)
    assert_answers(chunked(wire, path, chunks(*[bytes([one]) for one in b"[%s]" % (b" " * 500)])), SUCCESS)
    assert sent(wire, name) == [[1, 2], {"a": 3}, 4, 5, None, []]


def test_gzip_bodies(wire, name):
    path = f"{QUEUE}/{name}/send"
    one = gzipped(b'"abc"')
    for encoding in ("gzip", "GZIP", "x-gzip", "identity, gzip"):
        assert_answers(chunked(wire, path, chunks(one), f"Content-Encoding: {encoding}"), SUCCESS)
    two = gzipped(b'"a') + gzipped(b'bc"')
    assert_answers(chunked(wire, path, chunks(two), "Content-Encoding: gzip"), SUCCESS)
    assert_answers(post(wire, path, two, "Content-Encoding: gzip"), SUCCESS)
    split = chunks(*[one[start : start + 1] for start in range(len(one))])
    assert_answers(chunked(wire, path, split, "Content-Encoding: gzip"), SUCCESS)
    assert_answers(chunked(wire, path, chunks(gzipped(b"")), "Content-Encoding: gzip"), SUCCESS)
    assert sent(wire, name) == ["abc"] * 7 + [None]


def test_damaged_gzip(wire, name):
    path = f"{QUEUE}/{name}/send"
    whole = gzipped(b'"abc"')
    flipped = bytearray(whole)
    flipped[-6] ^= 1  # its checksum
    for content in (
        whole[:-1],
        whole[:5],
        bytes(flipped),
        b'"abc"',
        whole + b"x",
        whole + b"\x1f\x8b",
        b"\x1f",
    ):
        assert_no_json(post(wire, path, content, "Content-Encoding: gzip"))
    for encoding in ("deflate", "br", "gzip, gzip", "zip"):
        assert_no_json(post(wire, path, whole, f"Content-Encoding: {encoding}"))
    assert sent(wire, name) == []


def test_a_body_that_is_too_large_decompressed_or_not(served, name):
    path = f"{QUEUE}/{name}/sendbatch"
    inside = b"[" + b" " * (MAX_BODY - 2) + b"]"
    for content, status in ((inside, 200), (inside + b" ", 413), (gzip_bomb(1_000), 413)):
        with Wire(served.gateway.port) as wire:
            is_gzip = content.startswith(b"\x1f")
            headers = ["Content-Encoding: gzip"] if is_gzip else []
            answer = post(wire, path, content, *headers)
            assert answer.status == status
            if status == 413:
                assert answer.json.keys() == {"message"}
    tracemalloc.start()
    try:
        with Wire(served.gateway.port) as wire:
            assert chunked(wire, path, chunks(gzip_bomb(100)), "Content-Encoding: gzip").status == 413
        assert tracemalloc.get_traced_memory()[1] < 20 * MAX_BODY
    finally:
        tracemalloc.stop()
    assert wait_until(lambda: served.gateway._app.held_bytes == 0, 10, every_s=0.01)


def gzip_bomb(mebibytes):
    return gzipped(b"[" + b" " * 1024 * 1024) + gzipped(b" " * 1024 * 1024) * (mebibytes - 1)


def test_a_body_that_does_not_end_in_time(served, name):
    with Wire(served.gateway.port) as wire:
        wire.send(
            f"POST {QUEUE}/{name}/send HTTP/1.1\r\nHost: localhost\r\n{JSON}\r\n".encode(),
            b"Content-Length: 9\r\n\r\n1",
        )
        answer = wire.answer("POST")
        assert (answer.status, answer.headers["connection"]) == (408, "close")
        assert wire.is_closed()


def test_a_client_that_leaves_in_the_middle_of_its_body_sends_nothing(served, wire, name):
    with Wire(served.gateway.port) as other:
        other.send(
            f"POST {QUEUE}/{name}/send HTTP/1.1\r\nHost: localhost\r\n{JSON}\r\n".encode(),
            b"Content-Length: 2\r\n\r\n1",
        )
    assert wait_until(lambda: served.gateway._app.running == 0, 10, every_s=0.01)
    assert sent(wire, name) == []


def test_a_client_may_wait_for_100_continue(wire, name):
    head = f"POST {QUEUE}/{name}/send HTTP/1.1\r\nHost: localhost\r\n{JSON}\r\nContent-Length: 1\r\n"
    wire.send(f"{head}Expect: 100-continue\r\n\r\n".encode())
    assert wire.socket.recv(100).startswith(b"HTTP/1.1 100 ")
    wire.send(b"1")
    assert_answers(wire.answer("POST"), SUCCESS)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        SEND_HEAD + b"Content-Length: x\r\n\r\n1",
        SEND_HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
        SEND_HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_no_http_ends_the_connection(served, request_bytes):
    with Wire(served.gateway.port) as wire:
        wire.send(request_bytes)
        while piece := wire.socket.recv(10_000):
            assert b" 5" not in piece.partition(b"\r\n")[0]


@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [("1.1", 1, 200), ("1.1", 0, 400), ("1.1", 2, 400), ("1.0", 0, 200), ("1.0", 1, 200)],
)
def test_a_request_of_http_1_1_has_one_host(served, version, hosts, status):
    for port, path in ((served.gateway.port, f"{QUEUE}/ping"), (served.gateway.admin_port, "/healthcheck")):
        with Wire(port) as wire:
            wire.send(f"GET {path} HTTP/{version}\r\n".encode(), b"hOST: localhost\r\n" * hosts, b"\r\n")
            assert wire.answer().status == status
            if status == 400:
                assert wire.is_closed()


def test_offers_of_http_2_are_answered_in_http_1_1(served, wire, name, caplog):
    """Java's own client does, with each request."""
    offer = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB"
    for _ in range(2):
        assert_answers(post(wire, f"{QUEUE}/{name}/send", 1, offer), SUCCESS)
        assert_answers(chunked(wire, f"{QUEUE}/{name}/send", chunks(b"[", b"2]"), offer), SUCCESS)
        assert_answers(post(wire, f"{QUEUE}/{name}/unclaimall", None, offer), SUCCESS)
        assert get(wire, f"{QUEUE}/{name}/claimcount", offer).json == 0
    one = SEND_HEAD.replace(b"no-http", name.encode()) + f"{offer}\r\nContent-Length: 1\r\n\r\n".encode()
    wire.send(one + b"3" + one + b"4")
    answers = b""
    while answers.count(b'{"success":true}') < 2:  # they may come together
        answers += wire.socket.recv(65536)
    assert answers.count(b"HTTP/1.1 200 ") == 2
    assert sent(wire, name) == [1, [2], 1, [2], 3, 4]
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
    with Wire(served.gateway.port) as other:
        assert other.ask("CONNECT / HTTP/1.1").status == 400
        assert other.is_closed()


def test_a_head_that_is_too_large(served):
    with Wire(served.gateway.port) as wire:
        answer = wire.ask(f"GET {QUEUE}/ping HTTP/1.1\r\nX: {'x' * 20_000}")
        assert answer.status == 431
        assert wire.is_closed()


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
def test_moves_that_are_wrong(wire, name, base):
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


def test_order_of_checks(tmp_path, name):
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


# --- connections, overload --------------------------------------------------------------------------------


def test_an_overloaded_gateway_says_so_in_emodb_s_way(name):
    for limits, body in (
        (Limits(max_requests=0), b"1"),
        (Limits(max_held_bytes=100), b'"%s"' % (b"x" * 200)),
        (Limits(max_held_bytes=100), gzipped(b'"%s"' % (b"x" * 200))),
    ):
        with running(fresh_memory(), limits=limits) as served, Wire(served.gateway.port) as wire:
            encoding = ["Content-Encoding: gzip"] if body.startswith(b"\x1f") else []
            answer = post(wire, f"{QUEUE}/{name}/send", body, *encoding)
            assert (answer.status, answer.exception) == (503, UNAVAILABLE)
            assert answer.headers["retry-after"] == "1"
            assert answer.json.keys() == {"message", "retryAfterSeconds"}
            assert answer.json["retryAfterSeconds"] == 1


def test_while_it_drains_it_serves_and_asks_clients_to_close(name):
    with running(fresh_memory(), drain_s=0.5) as served, Wire(served.gateway.port) as wire:
        assert "connection" not in post(wire, f"{QUEUE}/{name}/send", 1).headers
        assert served.admin("/healthcheck", "HEAD").status == 200
        served.loop.call_soon_threadsafe(served.gateway.request_stop)
        assert wait_until(lambda: served.admin("/readyz").status == 503, 10, every_s=0.001)
        answer = get(wire, f"{QUEUE}/{name}/poll")
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert wire.is_closed()
        assert served.admin("/healthcheck", "HEAD").status == 503


def test_the_admin_port_needs_no_key_and_has_no_queues(tmp_path):
    keys = FileKeys(tmp_path / "keys")
    keys.put(new_key("one", ["queue_admin"], [])[0])
    with running(fresh_memory(), keys) as served, Wire(served.gateway.admin_port) as wire:
        head = wire.ask("HEAD /healthcheck HTTP/1.1\r\nConnection: close")
        assert (head.status, head.body) == (200, b"")
        assert wire.is_closed()
        for path in ("/healthcheck", "/livez", "/readyz", "/ping", "/metrics"):
            assert served.admin(path).status == 200
        assert served.admin(f"{QUEUE}/q/poll").status == 404


def test_requests_that_stand_in_line_are_answered_in_order(wire, name):
    """HTTP allows a client to send the next request before it has read the answer."""
    one = f"POST {QUEUE}/{name}/send HTTP/1.1\r\nHost: localhost\r\n{JSON}\r\nContent-Length: 1\r\n\r\n"
    other = f"GET {QUEUE}/{name}/size HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    wire.send(f"{one}1{one}2{other}".encode())
    received = b""
    while piece := wire.socket.recv(10_000):
        received += piece
    assert received.count(b"HTTP/1.1 200") == 3
    assert received.endswith(b"\r\n\r\n2")


def test_z_an_idle_connection_stays_open_for_more_than_5_s(idle):
    """The last of this module, so that the others run meanwhile."""
    wire, since_s = idle
    time.sleep(max(0.0, since_s + 6.0 - time.monotonic()))
    assert get(wire, f"{QUEUE}/ping").body == b"pong"
