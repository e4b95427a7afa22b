"""The native calls: what each does, what is refused and how, and the document that describes them."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from urllib.parse import quote

import jsonschema
import pytest
from gateway_support import Answer, Served, fresh_memory, running
from hypothesis import HealthCheck, Phase, given, settings

from kmqpy.cli.output import as_object
from kmqpy.gateway.dialects.native import calls
from kmqpy.gateway.dialects.native.calls import Calls
from kmqpy.gateway.keys.keyring import new_key
from kmqpy.gateway.keys.stores import KEYS_QUEUE, FileKeys, StorageKeys
from kmqpy.gateway.limits import Limits
from kmqpy.queue import storage_for
from kmqpy.queue.shapes import PROBLEM, PROBLEM_TYPE

TEXT = {"Content-Type": "text/plain"}


class Native:
    """Native calls of one queue; what is shown must be as the document says."""

    def __init__(self, served: Served, queue: str = "jobs", key: str | None = None) -> None:
        self.served = served
        self.path = f"/v1/queues/{quote(queue, safe='')}"
        self.headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    def ask(self, method: str, call: str = "", body=None, *, raw=None, headers=None) -> Answer:
        given = {**self.headers, **(headers or {})}
        return self.served.ask(method, self.path + call, body, given, raw=raw)

    def good(self, method: str, call: str = "", body=None, **more):
        answer = self.ask(method, call, body, **more)
        assert answer.status in (200, 204), answer
        return answer.json if answer.status == 200 else None

    def take(self, query: str = "max_messages=10"):
        return self.good("POST", f"/receive?{query}")["messages"]


def problem(answer: Answer, kind: str, status: int) -> dict:
    """What a problem says."""
    assert answer.headers["content-type"] == PROBLEM, answer
    found = json.loads(answer.body)
    assert (answer.status, found["status"], found["type"]) == (status, status, PROBLEM_TYPE + kind), answer
    return found


@pytest.fixture(scope="module", params=["memory", pytest.param("sqlite", marks=pytest.mark.breadth)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    storage = fresh_memory()
    if request.param == "sqlite":
        storage = storage_for(f"sqlite:///{tmp_path_factory.mktemp('native')}/q.db")
    with running(storage, limits=Limits(max_message_bytes=64 * 1024)) as found:
        yield found


@pytest.fixture
def native(served: Served, request: pytest.FixtureRequest) -> Native:
    made = Native(served, f"{request.node.name} häß/%?#")
    made.good("PUT", body={"settings": {"max_redeliveries": 1}})
    return made


def test_a_message_is_sent_taken_and_finished(native: Native) -> None:
    query = "?key=user-1&header=a=1&header=a=2&priority=5&group=g"
    sent = native.good("POST", f"/messages{query}", raw=b"hello", headers=TEXT)["id"]
    (message,) = native.take("lease=5")
    assert (message["id"], message["body"], message["key"]) == (sent, "hello", "user-1")
    assert (message["attempts"], message["group"]) == (1, "g")
    assert message["headers"] == {"a": "2", "content-type": "text/plain"}
    assert [name for name, _ in message["header_pairs"]] == ["a", "a", "content-type"]
    named = {"receipts": [message["receipt"]]}
    assert native.good("POST", "/extend", {**named, "lease": 30}) == {"lost": []}
    (orphan,) = native.good("GET", "/orphans")["orphans"]
    assert (orphan["receipt"], orphan["message"]["body"]) == (message["receipt"], "hello")
    native.good("POST", "/nack", {**named, "reason": "later", "delay": 60})
    assert native.good("GET", "/size")["count"] == 1
    assert native.good("POST", "/extend", {**named, "lease": 30}) == {"lost": named["receipts"]}
    native.good("POST", "/ack", {"ids": [sent]})
    assert native.good("GET", "/size?limit=5") == native.good("GET", "/in-flight") == {"count": 0}


def test_a_message_looks_as_kmq_receive_prints_it(native: Native) -> None:
    batch = [
        {"body": "t", "key_base64": "/w==", "headers": {"a": "b"}},
        {"body_base64": "/w==", "key": "k", "headers_base64": {"a": "/w=="}, "group": "g"},
    ]
    native.good("POST", "/batch", {"messages": batch})
    shown = native.good("GET", "/peek")["messages"]
    with native.served.storage.open(shown[0]["queue"]) as queue:
        printed = [as_object(one) for one in queue.peek()]
    for one, other in zip(shown, printed, strict=True):
        assert {**one, "lease_until_ms": 0} == {**other, "lease_until_ms": 0}


def test_dead_letters_are_listed_redriven_and_purged(native: Native) -> None:
    native.good("POST", "/batch", {"messages": [{"body": "a"}, {"body": "b"}]})
    receipts = [one["receipt"] for one in native.take()]
    native.good("POST", "/dead-letter", {"receipts": receipts, "reason": "no"})
    first, second = native.good("GET", "/dead-letters")["dead_letters"]
    assert (first["reason"], first["size"], "body" in first) == ("rejected: no", 1, False)
    peeked = native.good("GET", "/dead-letters/peek")["dead_letters"]
    assert [one["body"] for one in peeked] == ["a", "b"]
    assert native.good("POST", "/dead-letters/redrive", {"ids": [first["id"]]}) == {"count": 1}
    assert [one["body"] for one in native.take()] == ["a"]
    assert native.good("POST", "/dead-letters/purge") == {"count": 1}
    assert native.good("POST", "/release-all") == {"count": 1}
    assert native.good("POST", "/purge") == {"count": 1}
    assert second["id"] > first["id"]


def test_a_long_poll_ends_with_a_message_or_its_time(native: Native) -> None:
    begun_s = time.monotonic()
    assert native.take("wait=0.3") == []
    assert time.monotonic() - begun_s >= 0.3
    sending = threading.Timer(0.2, native.good, ("POST", "/messages"), {"raw": b"x"})
    sending.start()
    assert [one["body"] for one in native.take("wait=30")] == ["x"]
    sending.join()
    assert time.monotonic() - begun_s < 15


def test_a_queue_is_described_changed_and_deleted(served: Served) -> None:
    native = Native(served, "life")
    native.good("PUT", body={"settings": {"lease_ms": "5s"}})
    assert "life" in served.ask("GET", "/v1/queues").json["queues"]
    problem(native.ask("PUT"), "ConfigError", 400)
    native.good("PATCH", body={"settings": {"lease_ms": 7_000}})
    found = native.good("GET")
    assert (found["settings"]["lease_ms"], found["ready"]) == (7_000, 0)
    assert native.good("POST", "/receive") == {"messages": [], "waited_ms": 0, "lease_ms": 7_000}
    wanted = {"settings": {"notes": "x"}, "expected": {"notes": "other"}}
    problem(native.ask("PATCH", body=wanted), "Changed", 409)
    native.good("DELETE")
    for call, method in (("", "GET"), ("", "DELETE"), ("/size", "GET"), ("/receive", "POST")):
        problem(native.ask(method, call), "QueueNotFound", 404)
    native.good("PUT")
    assert native.good("GET", "/size") == {"count": 0}  # known at once


def test_a_queue_that_was_made_anew_is_another(served: Served) -> None:
    native = Native(served, "anew")
    native.good("PUT")
    opened = {"Kmq-Queue-Id": quote(native.good("GET", "/handle")["unique_id"])}
    assert native.good("GET", "/size", headers=opened) == {"count": 0}
    native.good("DELETE")
    native.good("PUT")
    found = problem(native.ask("GET", "/size", headers=opened), "QueueNotFound", 404)
    assert "another" in found["detail"]
    assert native.good("GET", "/size") == {"count": 0}


def test_a_repeated_send_with_an_idempotency_key_is_one_message(native: Native) -> None:
    key = {"Idempotency-Key": "order-5"}
    ids = {native.good("POST", "/messages", raw=b"x", headers=key)["id"] for _ in range(2)}
    assert len(ids) == native.good("GET", "/size")["count"] == 1


@pytest.mark.parametrize(
    ("method", "call", "body", "kind", "field", "value"),
    [
        ("POST", "/messages?priority=12", b"x", "ConfigError", "priority", "12"),
        ("POST", "/messages?delay=1e9", b"x", "MessageError", "delay", 1e9),
        ("POST", "/messages?header=x", b"x", "ConfigError", "header", None),
        ("POST", "/messages?dely=1", b"x", "ConfigError", "query", None),
        ("POST", "/messages", b"x" * 65_537, "MessageError", "body", None),
        ("POST", "/receive?lease=1e9", None, "ConfigError", "lease", 1e9),
        ("POST", "/receive?max_messages=1001", None, "ConfigError", "max_messages", "1001"),
        ("POST", "/receive?wait=1&wait=2", None, "ConfigError", "wait", "1"),
        ("POST", "/ack", {"receipts": ["no"]}, "ReceiptError", "receipt", None),
        ("POST", "/ack", {"ids": ["no"]}, "ReceiptError", "id", None),
        ("POST", "/ack", {"receipts": ["x"] * 1_001}, "ConfigError", "receipts", None),
        ("POST", "/nack", {"delay": 1e9}, "ConfigError", "delay", 1e9),
        ("POST", "/extend", {"receipts": []}, "ConfigError", "body", None),
        ("POST", "/batch", {"messages": [{"body": "x"}, {"priority": -1}]}, "ConfigError", None, None),
        (
            "POST",
            "/batch",
            {"messages": [{"body": "x", "body_base64": "eQ=="}]},
            "MessageError",
            "message",
            None,
        ),
        ("POST", "/dead-letters/redrive", {"ids": [], "limit": 1}, "ConfigError", "redrive", None),
        ("PATCH", "", {"settings": {"lease_ms": 5}}, "ConfigError", "lease_ms", 5),
        ("GET", "/orphans?older_than=1&queued_before_ms=1", None, "ConfigError", "orphans", None),
    ],
)
def test_what_is_wrong_is_named_and_changes_nothing(native: Native, method, call, body, kind, field, value):
    before = native.good("GET")
    raw, plain = (body, None) if isinstance(body, bytes) else (None, body)
    found = problem(native.ask(method, call, plain, raw=raw), kind, 400)
    if field is not None:
        assert (found["field"], found.get("value")) == (field, value), found
        assert field in found["detail"]
    assert native.good("GET") == before


def test_other_refusals(native: Native) -> None:
    assert "0 of" not in problem(native.ask("GET", "/trace?message=1"), "NotSupported", 501)["detail"]
    problem(native.ask("GET", "/nothing"), "NotFound", 404)
    found = native.ask("DELETE", "/size")
    assert (problem(found, "NotAllowed", 405), found.headers["allow"])[1] == "GET, HEAD, OPTIONS"
    assert native.ask("OPTIONS", "/ack").headers["allow"] == "POST, OPTIONS"
    problem(native.ask("POST", "/ack", raw=b"{}", headers=TEXT), "BadEncoding", 415)
    json_kind = {"Content-Type": "application/json"}
    problem(native.ask("POST", "/ack", raw=b"," * 1_000_001, headers=json_kind), "TooLarge", 413)
    found = problem(native.ask("POST", "/ack", raw=b"x", headers=json_kind), "ConfigError", 400)
    assert found["detail"].startswith("body: JSON is malformed")
    problem(native.ask("GET", "/size?limit=%ff"), "ConfigError", 400)


def test_a_late_body_and_an_error_of_the_gateway_are_problems_too(monkeypatch) -> None:
    with running(fresh_memory(), limits=Limits(body_timeout_s=0.05)) as served:
        head = b"POST /v1/queues/q/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
        with socket.create_connection(("127.0.0.1", served.gateway.port), timeout=20) as late:
            late.sendall(head)
            answer = late.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 408")
        assert b'"type":"urn:kmqpy:error:BodyTimeout"' in answer
        monkeypatch.setattr(calls, "size_of", None)
        found = problem(Native(served).ask("POST", "/messages", raw=b"x"), "KmqError", 500)
        assert found["detail"] == "internal error; the gateway's log says more"


def test_who_may_do_what(tmp_path) -> None:
    storage = fresh_memory()
    storage.create("mine")
    storage.create("other")
    secrets = {}
    keys = FileKeys(tmp_path / "keys")
    for action in ("post", "poll", "get_status", "manage"):
        key, secrets[action] = new_key(action, [], [f"queue|{action}|mine"])
        keys.put(key)
    endpoints = [one for one in Calls(None, None).endpoints() if one.action is not None]
    with running(storage, keys) as served:

        def ask(endpoint, queue: str, headers: dict[str, str]) -> Answer:
            path = "/v1" + endpoint.path.replace("{queue}", queue)
            return served.ask(endpoint.method, path, headers=headers)

        for endpoint in endpoints:
            for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": f"Basic {secrets['post']}"}):
                answer = ask(endpoint, "mine", headers)
                assert "KMQ_API_KEY" in problem(answer, "AccessDenied", 401)["detail"]
                assert answer.headers["www-authenticate"]
            for action, secret in secrets.items():
                bearer = {"Authorization": f"Bearer {secret}"}
                problem(ask(endpoint, "other", bearer), "AccessDenied", 403)
                if action != endpoint.action:
                    found = problem(ask(endpoint, "mine", bearer), "AccessDenied", 403)
                    assert f"queue|{endpoint.action}|mine" in found["detail"]
        assert storage.list() == ["mine", "other"]
        assert all(storage.describe(one).ready == 0 for one in storage.list())
        for action, names in (("get_status", ["mine"]), ("post", [])):
            bearer = {"Authorization": f"Bearer {secrets[action]}"}
            assert served.ask("GET", "/v1/queues", headers=bearer).json == {"queues": names}
        for endpoint in (one for one in endpoints if one.name != "delete"):
            bearer = {"Authorization": f"Bearer {secrets[endpoint.action]}"}
            assert ask(endpoint, "mine", bearer).status not in (401, 403), endpoint


def test_queues_of_the_gateway_itself_are_out_of_reach() -> None:
    storage = fresh_memory()
    keys = StorageKeys(storage)
    key, secret = new_key("all", ["queue_admin"], [])
    keys.put(key)
    with running(storage, keys, name="own") as served:
        for name in (KEYS_QUEUE, f"own:{KEYS_QUEUE}", KEYS_QUEUE.lower(), "KMQ.moves"):
            native = Native(served, name, secret)
            problem(native.ask("GET", "/peek"), "AccessDenied", 403)
            problem(native.ask("POST", "/messages", raw=b"{}"), "AccessDenied", 403)
            problem(native.ask("PUT"), "AccessDenied", 403)
        listed = served.ask("GET", "/v1/queues", headers={"Authorization": f"Bearer {secret}"}).json
        assert listed == {"queues": []}


# --- the document -------------------------------------------------------------------------------------


def test_the_document_has_all_calls_and_is_openapi(served: Served) -> None:
    found = served.ask("GET", "/v1/openapi.json").json
    assert found["openapi"] == "3.1.0"
    listed = {(method.upper(), path) for path, methods in found["paths"].items() for method in methods}
    endpoints = Calls(None, None).endpoints()
    assert listed == {(one.method, f"/v1{one.path}") for one in endpoints}
    names = [one["operationId"] for methods in found["paths"].values() for one in methods.values()]
    assert len(names) == len(set(names)) == len(endpoints)
    schemas = found["components"]["schemas"]
    assert set(re.findall(r"#/components/schemas/(\w+)", json.dumps(found))) == schemas.keys()
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_whatever_comes_is_answered_as_the_document_says(served: Served) -> None:
    """By schemathesis: no server error, and statuses, types and shapes are those of the document."""
    schemathesis = pytest.importorskip("schemathesis")
    url = f"http://127.0.0.1:{served.gateway.port}"
    native = Native(served, "any")
    native.good("PUT")
    document = served.ask("GET", "/v1/openapi.json").json
    known = pytest.importorskip("schemathesis.specs.openapi.checks")
    checks = [
        known.status_code_conformance,
        known.content_type_conformance,
        known.response_schema_conformance,
    ]
    few = settings(
        max_examples=5,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for found in schemathesis.openapi.from_dict(document).get_all_operations():

        @few
        @given(case=found.ok().as_strategy())
        def check(case) -> None:
            if "queue" in case.path_parameters:
                case.path_parameters["queue"] = "any"
            case.query.pop("wait", None)
            answer = case.call(base_url=url)
            case.validate_response(answer, checks=checks)
            assert answer.status_code < 500 or (answer.status_code, case.path[-6:]) == (501, "/trace")

        check()
