"""Whatever comes to EmoDB's paths: no server error, nothing logged as one, and the gateway goes on."""

import contextlib
import json
import logging
import uuid
from collections.abc import Iterator
from urllib.parse import quote_from_bytes

import pytest
from gateway_support import DEDUP, QUEUE, Answer, Served, fresh_memory, running
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from wire import Wire, chunks, gzipped

from kmqpy.gateway.limits import Limits

EXAMPLES = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
SEND = (
    f"POST {QUEUE}/q/send HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    "Transfer-Encoding: chunked\r\n\r\n"
).encode()
VERBS = ("send", "sendbatch", "ack", "renew", "poll", "peek", "size", "claimcount", "unclaimall")


class Prober(logging.Handler):
    """Sends requests to a gateway, mostly on one connection; keeps what is logged as an error."""

    def __init__(self, served: Served) -> None:
        super().__init__(logging.WARNING)
        self.served = served
        self.errors: list[str] = []
        self._wire: Wire | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or record.levelno >= logging.ERROR:
            self.errors.append(self.format(record))

    def ask(self, request: bytes, method: str = "GET") -> Answer:
        """The answer to one whole request, which is no server's error."""
        if self._wire is None:
            self._wire = Wire(self.served.gateway.port)
        self._wire.send(request)
        answer = self._wire.answer(method)
        if answer.headers.get("connection") == "close":
            self.close()
        assert answer.status < 500, answer
        assert not 300 <= answer.status < 400 or answer.headers["location"] == "/console/", answer
        assert not self.errors
        return answer

    def post(self, path: str, body: bytes, *headers: bytes) -> Answer:
        """POST a body of JSON, with its length unless the headers say that it is chunked."""
        is_chunked = any(b"chunked" in one for one in headers)
        length = [] if is_chunked else [b"Content-Length: %d" % len(body)]
        head = [f"POST {path} HTTP/1.1".encode(), b"Content-Type: application/json", *length, *headers]
        return self.ask(b"\r\n".join(head) + b"\r\nHost: localhost\r\n\r\n" + body, "POST")

    def get(self, path: str, method: str = "GET") -> Answer:
        return self.ask(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(), method)

    def close(self) -> None:
        if self._wire is not None:
            self._wire.socket.close()
            self._wire = None


@pytest.fixture(scope="module")
def prober() -> Iterator[Prober]:
    with running(fresh_memory(), limits=Limits(max_body_bytes=200_000)) as served:
        found = Prober(served)
        logging.getLogger().addHandler(found)
        try:
            yield found
        finally:
            logging.getLogger().removeHandler(found)
            found.close()


def new_queue(base=QUEUE):
    return f"{base}/f-{uuid.uuid4().hex[:12]}"


# --- what is sent -----------------------------------------------------------------------------------------

visible = st.characters(min_codepoint=0x21, max_codepoint=0xFF, exclude_characters="\x7f")
segments = st.one_of(
    st.binary(max_size=12).map(quote_from_bytes),
    st.text(visible, max_size=12),
    st.sampled_from(
        [*VERBS, "_move", "_sendbatch", "ping", "q", "__q", ".", "..", "", "%2F", "%", "%00", "?", "#"]
    ),
)
queries = st.one_of(
    st.just(""),
    st.text(visible, max_size=40),
    st.lists(
        st.tuples(
            st.sampled_from(["limit", "ttl", "from", "to", "partitioned", "APIKey", "x"]),
            st.one_of(st.integers().map(str), st.binary(max_size=12).map(quote_from_bytes)),
        ),
        max_size=4,
    ).map(lambda pairs: "&".join(f"{name}={value}" for name, value in pairs)),
)
methods = st.sampled_from(["GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS", "PATCH", "TRACE"])
header_names = st.one_of(
    st.sampled_from(
        [
            "Content-Type",
            "Content-Encoding",
            "X-BV-API-Key",
            "Accept",
            "Accept-Encoding",
            "Connection",
            "Expect",
            "Upgrade",
            "X-Request-Id",
            "Host",
            "Cookie",
            "Range",
            "If-None-Match",
            "Authorization",
            "Origin",
            "TE",
        ]
    ),
    st.text("abcdefghijklmnopqrstuvwxyzABC0123456789-_!#$%&'*+.^`|~", min_size=1, max_size=20),
)
header_values = st.one_of(
    st.sampled_from(
        [b"gzip", b"close", b"keep-alive", b"100-continue", b"application/json", b"*/*", b"websocket"]
    ),
    st.binary(max_size=40).map(lambda value: value.translate(None, bytes([*range(9), *range(10, 32), 127]))),
)
numbers = st.one_of(
    st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.integers(-(10**400), 10**400)
)
values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), numbers, st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), inner, max_size=5),
    ),
    max_leaves=12,
)
json_texts = st.builds(
    lambda value, escaped, indent: json.dumps(value, ensure_ascii=escaped, indent=indent).encode(),
    values,
    st.booleans(),
    st.sampled_from([None, 0, 3]),
)


@st.composite
def damaged(draw, texts=json_texts):
    """JSON of which a piece is missing, replaced or repeated."""
    text = draw(texts)
    start = draw(st.integers(0, len(text)))
    end = draw(st.integers(start, len(text)))
    return text[:start] + draw(st.one_of(st.binary(max_size=4), st.just(text))) + text[end:]


bodies = st.one_of(st.binary(max_size=200), json_texts, damaged())


def packed(body, way):
    """A body as it goes over the wire, and its headers."""
    if "gzip" in way:
        body = gzipped(body)
    if "chunked" in way:
        body = b"".join(chunks(*[one for one in (body[:3], body[3:]) if one]))
    names = {"gzip": b"Content-Encoding: gzip", "chunked": b"Transfer-Encoding: chunked"}
    return body, [names[one] for one in way]


ways = st.sampled_from([(), ("gzip",), ("chunked",), ("gzip", "chunked")])


# --- the tests --------------------------------------------------------------------------------------------


@EXAMPLES
@given(
    base=st.sampled_from([QUEUE, DEDUP, "", "/queue", "/queue/2"]),
    path=st.lists(segments, max_size=4),
    query=queries,
    method=methods,
    body=st.one_of(st.just(b""), bodies),
)
def test_any_path(prober, base, path, query, method, body):
    target = f"{base}/{'/'.join(path)}?{query}".encode("latin-1")
    head = b"%s %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" % (
        method.encode(),
        target,
    )
    prober.ask(head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body), method)


@EXAMPLES
@given(
    verb=st.sampled_from(VERBS),
    headers=st.lists(st.tuples(header_names, header_values), max_size=5),
    body=st.one_of(st.just(b"[]"), bodies),
)
def test_any_header(prober, verb, headers, body):
    method = "POST" if verb in {"send", "sendbatch", "ack", "renew", "unclaimall"} else "GET"
    if all(name.lower() != "host" for name, _ in headers):
        headers = [("Host", b"localhost"), *headers]
    lines = b"".join(b"%s: %s\r\n" % (name.encode(), value) for name, value in headers)
    head = f"{method} {QUEUE}/q/{verb} HTTP/1.1\r\nContent-Length: {len(body)}\r\n".encode()
    prober.ask(head + lines + b"\r\n" + body, method)


@EXAMPLES
@given(
    verb=st.sampled_from([*VERBS[:4], "_sendbatch"]),
    body=bodies,
    way=ways,
    base=st.sampled_from([QUEUE, DEDUP]),
)
@example("send", b"[" * 400 + b"]" * 400, (), DEDUP)
@example("send", b"9" * 5_000, (), DEDUP)
@example("send", b"1e999999999", (), DEDUP)
@example("_sendbatch", b'{"":[1]}', (), QUEUE)
def test_any_body(prober, verb, body, way, base):
    content, headers = packed(body, way)
    path = f"{base}/_sendbatch" if verb == "_sendbatch" else f"{base}/q/{verb}"
    prober.post(path, content, *headers)
    held = prober.get(f"{base}/q/peek?limit=1000").body
    assert isinstance(json.loads(held, parse_int=str, parse_float=str), list)  # int() refuses 5,000 digits
    prober.get(f"{base}/q", "DELETE")


@EXAMPLES
@given(batch=st.lists(json_texts, min_size=1, max_size=4), way=ways, base=st.sampled_from([QUEUE, DEDUP]))
def test_any_json_comes_back(prober, batch, way, base):
    queue = new_queue(base)
    for body in batch:
        content, headers = packed(body, way)
        assert prober.post(f"{queue}/send", content, *headers).status == 200
    content, headers = packed(b"[" + b",".join(batch) + b"]", way)
    assert prober.post(f"{queue}/sendbatch", content, *headers).status == 200
    wanted = [json.loads(body) for body in batch] * 2
    peeked = prober.get(f"{queue}/peek?limit=100").json
    assert [one["payload"] for one in peeked] == wanted
    polled = prober.get(f"{queue}/poll?limit=100").json
    if base == QUEUE:
        assert polled == peeked
    else:
        assert all(one in peeked for one in polled)
        assert all(one in [payload["payload"] for payload in polled] for one in wanted)
    assert prober.post(f"{queue}/ack", json.dumps([one["id"] for one in polled]).encode()).status == 200
    assert prober.get(f"{queue}/size").json == 0


@EXAMPLES
@given(
    forged=st.one_of(
        values,
        st.text("0123456789abcdef", min_size=38, max_size=42),
        st.binary(max_size=60).map(bytes.hex),
        st.tuples(st.integers(0, 39), st.sampled_from("0123456789abcdefg ")),
    ),
    call=st.sampled_from(["ack", "renew?ttl=0", "renew"]),
)
def test_forged_ids_do_nothing(prober, forged, call):
    queue = f"{QUEUE}/forged"
    if prober.get(f"{queue}/size").json == 0:
        prober.post(f"{queue}/send", b"1")
        assert len(prober.get(f"{queue}/poll?ttl=3600").json) == 1
    (own,) = (one["id"] for one in prober.get(f"{queue}/peek").json)
    if isinstance(forged, tuple):
        place, digit = forged
        forged = own[:place] + digit + own[place + 1 :]
    assume(not isinstance(forged, str) or forged.lower() != own)
    answer = prober.post(f"{queue}/{call}", json.dumps([own, forged]).encode())
    assert (answer.status, answer.exception) == (400, "java.lang.IllegalArgumentException")
    assert answer.body in {b"Invalid event ID.", b"Invalid event ID checksum."}
    assert (prober.get(f"{queue}/size").json, prober.get(f"{queue}/claimcount").json) == (1, 1)


@EXAMPLES
@given(
    st.one_of(
        st.binary(max_size=200),
        st.tuples(st.binary(max_size=40), st.binary(max_size=40)).map(
            lambda both: b"POST /queue/1/q/send HTTP/1.1\r\n%s\r\n\r\n%s" % both
        ),
        damaged(st.just(SEND + b"1\r\n1\r\n0\r\n\r\n")),
    )
)
@example(SEND + b"1\r\n1\r\nx")  # no HTTP, while the call runs
@example(2 * (SEND + b"1\r\n1\r\n0\r\n\r\n") + b"x")
def test_any_bytes(prober, content):
    with Wire(prober.served.gateway.port) as wire:
        wire.send(content)
        wire.end()
        received = b""
        with contextlib.suppress(ConnectionError):
            while piece := wire.socket.recv(65_536):
                received += piece
    assert b"HTTP/1.1 5" not in received
    assert not prober.errors
    assert prober.get(f"{QUEUE}/ping").body == b"pong"
