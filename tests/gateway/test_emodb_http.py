"""How requests of EmoDB's clients come: bodies, chunks, gzip, what is no HTTP, connections, overload."""

import logging
import time
import tracemalloc
from collections.abc import Iterator

import pytest
from emodb_answers import BAD_NAME, JSON, SUCCESS, assert_answers, assert_illegal, assert_no_json, get, post
from gateway_support import DEDUP, QUEUE, Served, fresh_memory, running
from wire import Wire, chunks, gzipped

from kmqpy.core.clock import wait_until
from kmqpy.gateway.keys.keyring import new_key
from kmqpy.gateway.keys.stores import FileKeys
from kmqpy.gateway.limits import Limits

UNAVAILABLE = "com.bazaarvoice.emodb.common.api.ServiceUnavailableException"
SEND_HEAD = f"POST {QUEUE}/no-http/send HTTP/1.1\r\nHost: localhost\r\n{JSON}\r\n".encode()
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
def test_malformed_json_is_refused_and_sends_nothing(wire, name, body):
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


def test_a_message_above_the_limit_is_refused(wire, name):
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
def test_only_json_is_taken_where_there_is_a_body(wire, name, kind, status):
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


def test_chunked_bodies_are_read(wire, name):
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


def test_gzip_bodies_are_read(wire, name):
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


def test_damaged_gzip_is_refused(wire, name):
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
