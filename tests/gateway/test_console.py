"""The gateway's console, without a browser: who may what, what is refused, and what streams do."""

import http.client
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.resources import files
from urllib.parse import quote

import pytest
from gateway_support import Served, fresh_memory, running

from kmqpy.core.clock import wait_until
from kmqpy.errors import Unavailable
from kmqpy.gateway import console
from kmqpy.gateway.console import sampler
from kmqpy.gateway.keys import keyring
from kmqpy.gateway.keys.keyring import new_key
from kmqpy.gateway.keys.stores import KEYS_QUEUE, FileKeys, StorageKeys

PAGES = {one.name: one.read_text() for one in files(console).joinpath("pages").iterdir()}


@pytest.fixture
def served(monkeypatch) -> Iterator[Served]:
    monkeypatch.setattr(sampler, "_ROUND_S", 0.05)
    with running(fresh_memory()) as found:
        yield found


@contextmanager
def live(served: Served, queue: str = "", key: str = "") -> Iterator[Iterator[dict]]:
    """The events of a tab."""
    connection = http.client.HTTPConnection("127.0.0.1", served.gateway.port, timeout=20)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    connection.request("GET", f"/console/live?queue={quote(queue)}", headers=headers)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    assert response.headers["content-type"].startswith("text/event-stream")

    def events() -> Iterator[dict]:
        kind = "rows"
        while line := response.readline():
            name, _, text = line.decode().strip().partition(": ")
            if name == "event":
                kind = text
            elif name == "data":
                yield {"kind": kind, **json.loads(text)}

    try:
        yield events()
    finally:
        response.close()
        connection.close()


def until(events: Iterator[dict], good, most: int = 200) -> dict:
    """The rows by name, when they are as wanted."""
    rows: dict = {}
    for event, _ in zip(events, range(most), strict=False):
        if event["whole"]:
            rows.clear()
        for name in event["gone"]:
            rows.pop(name, None)
        rows.update({row["name"]: row for row in event["rows"]})
        if good(rows, event):
            return rows
    raise AssertionError(rows)


def test_pages_come_without_a_key_and_run_nothing_but_their_own_files(served):
    for path in ("/", "/console"):
        answer = served.ask("GET", path)
        assert (answer.status, answer.headers["location"]) == (303, "/console/")
    for name in ("", *PAGES):
        answer = served.ask("GET", f"/console/{name}")
        assert answer.status == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert served.ask("GET", "/console/../server.py").status == 404
    assert served.ask("GET", "/console/%2e%2e%2fserver.py").status == 404
    refused = served.ask("POST", "/console/")
    assert (refused.status, "content-security-policy" in refused.headers) == (404, True)


@pytest.mark.parametrize("name", [one for one in PAGES if one.endswith(("html", "js"))])
def test_pages_make_no_markup_of_text_and_ask_nobody_else(name):
    dangerous = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|\.style\b|style="
    )
    assert not re.search(dangerous, PAGES[name])
    assert set(re.findall(r"https?://[^\"'` ]+", PAGES[name])) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<script(?![^>]*\bsrc=)|<[a-z]+ [^>]*\bon[a-z]+=", PAGES[name])


def test_a_tab_sees_what_changes_and_nothing_is_sampled_when_all_are_closed(served):
    served.storage.create("jobs")
    with live(served) as events, live(served, "jobs") as of_one:
        until(events, lambda rows, _: rows.get("jobs", {}).get("ready") == 0)
        assert served.ask("POST", "/v1/queues/jobs/messages", raw=b"x").status == 200
        rows = until(events, lambda rows, _: rows.get("jobs", {}).get("ready") == 1)
        assert (rows["jobs"]["in"], rows["jobs"]["depths"]) == (1, [[0, 1]])
        assert rows["jobs"]["may"] == ["post", "poll", "get_status", "manage"]
        assert rows["jobs"]["oldest_ms"] > 0
        assert until(of_one, lambda rows, _: rows.get("jobs", {}).get("ready") == 1).keys() == {"jobs"}
        served.storage.delete("jobs")
        until(of_one, lambda _, event: "jobs" in event["gone"])
        until(events, lambda rows, _: not rows)
    assert wait_until(lambda: served.gateway._sampler._running is None, timeout_s=10)


def test_the_gateways_own_queues_are_not_shown(served):
    StorageKeys(served.storage).put(new_key("a", ["queue_admin"], [])[0])
    served.storage.create("jobs")
    _, secret = admin = new_key("b", ["queue_admin"], [])
    StorageKeys(served.storage).put(admin[0])
    with live(served, key=secret) as events:
        rows = until(events, lambda rows, _: rows.get("jobs", {}).get("ready") == 0)
    assert KEYS_QUEUE not in rows


def test_a_storage_that_is_lost_is_said_and_its_return_is_seen(served):
    served.storage.create("jobs")
    found = served.storage.list

    def lost():
        raise Unavailable("gone")

    with live(served) as events:
        until(events, lambda rows, _: rows.get("jobs", {}).get("ready") == 0)
        served.storage.list = lost
        until(events, lambda _, event: event["problem"] and not event["gone"])
        served.storage.list = found
        until(events, lambda _, event: not event["problem"])


def test_an_end_of_the_gateway_ends_streams(monkeypatch):
    monkeypatch.setattr(sampler, "_ROUND_S", 30.0)
    with running(fresh_memory()) as served, live(served) as events:
        next(events)
        begun = time.monotonic()
        served.loop.call_soon_threadsafe(served.gateway.request_stop)
        with suppress(http.client.HTTPException):
            assert len([*events]) <= 1
        assert time.monotonic() - begun < 5


KEYS = {
    "admin": (["queue_admin"], []),
    "reader": ([], ["queue|get_status|jobs*"]),
    "poster": ([], ["queue|post|jobs", "queue|get_status|jobs"]),
    "standard": (["queue_standard"], []),
    "manager": ([], ["queue|*|jobs"]),
    "almost": ([], ["queue|manage|*", "queue|poll|*", "queue|get_status|*"]),
}


@pytest.fixture
def keyed(tmp_path, monkeypatch) -> Iterator[tuple[Served, dict[str, str]]]:
    monkeypatch.setattr(sampler, "_ROUND_S", 0.05)
    monkeypatch.setattr(keyring, "_CACHED_S", 0.0)
    monkeypatch.setattr(console, "_CHECK_S", 0.05)
    store, secrets = FileKeys(tmp_path / "keys.json"), {}
    for title, given in KEYS.items():
        key, secrets[title] = new_key(title, *given)
        store.put(key)
    with running(fresh_memory(), store) as served:
        for name in ("jobs", "jobs-2", "other"):
            served.storage.create(name)
        yield served, secrets


def ask(served: Served, key: str, method: str, path: str, body=None):
    return served.ask(method, path, body, {"Authorization": f"Bearer {key}"})


@pytest.mark.parametrize(
    ("title", "sees", "may", "peeks", "keeps_keys"),
    [
        ("admin", {"jobs", "jobs-2", "other"}, ["post", "poll", "get_status", "manage"], 200, True),
        ("reader", {"jobs", "jobs-2"}, ["get_status"], 403, False),
        ("poster", {"jobs"}, ["post", "get_status"], 403, False),
        ("standard", {"jobs", "jobs-2", "other"}, ["post", "poll", "get_status"], 200, False),
        ("manager", {"jobs"}, ["post", "poll", "get_status", "manage"], 200, False),
        ("almost", {"jobs", "jobs-2", "other"}, ["poll", "get_status", "manage"], 200, False),
    ],
)
def test_a_key_shows_and_does_what_it_may(keyed, title, sees, may, peeks, keeps_keys):
    served, secrets = keyed
    key = secrets[title]
    with live(served, key=key) as events:
        rows = until(events, lambda rows, _: rows.get("jobs", {}).get("ready") == 0)
    assert rows.keys() == sees
    assert rows["jobs"]["may"] == may
    assert ask(served, key, "GET", "/v1/queues/jobs/dead-letters/peek").status == peeks
    me = ask(served, key, "GET", "/console/me").json
    assert (me["title"], me["keeps_keys"]) == (title, keeps_keys)
    for method, path, body in (
        ("GET", "/console/keys", None),
        ("POST", "/console/keys", {"roles": ["queue_admin"]}),
        ("DELETE", "/console/keys/x", None),
    ):
        assert (ask(served, key, method, path, body).status != 403) is keeps_keys, (method, path)
    with live(served, "other", key) as events:
        found = next(event for event in events if event["rows"] or "other" not in sees)
    assert bool(found["rows"]) is ("other" in sees)


def test_without_a_valid_key_nothing_is_told(keyed):
    served, _ = keyed
    for path in ("me", "live", "findings", "keys", "live?queue=jobs"):
        for key in ("", "wrong"):
            assert ask(served, key, "GET", f"/console/{path}").status == 401


def test_keys_are_made_shown_without_secrets_and_revoked_which_ends_their_tabs(keyed):
    served, secrets = keyed
    admin = secrets["admin"]
    made = ask(served, admin, "POST", "/console/keys", {"title": "x", "permissions": ["queue|*|jobs"]}).json
    listed = ask(served, admin, "GET", "/console/keys")
    assert made["secret"].encode() not in listed.body
    assert b"digest" not in listed.body
    (shown,) = (one for one in listed.json["keys"] if one["id"] == made["id"])
    assert (shown["title"], shown["permissions"], shown["own"]) == ("x", ["queue|*|jobs"], False)
    with live(served, key=made["secret"]) as events:
        next(events)
        assert ask(served, admin, "DELETE", f"/console/keys/{made['id']}").status == 204
        assert [*events][-1] == {"kind": "out"}
    assert ask(served, made["secret"], "GET", "/console/me").status == 401
    for body in ({}, {"roles": ["king"]}, {"permissions": ["sor|*"]}, {"digests": ["x"], "roles": []}):
        refused = ask(served, admin, "POST", "/console/keys", body)
        assert refused.status == 400, (body, refused)


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Origin": "https://evil.example"},
        {"Host": "evil.example"},
    ],
)
def test_web_pages_can_not_use_a_console_that_asks_for_no_keys(served, headers):
    served.storage.create("jobs")
    for method, path, body in (
        ("GET", "/console/me", None),
        ("GET", "/console/live", None),
        ("GET", "/console/findings", None),
        ("POST", "/console/keys", {"roles": ["queue_admin"]}),
        ("POST", "/v1/queues/jobs/purge", None),
    ):
        assert served.ask(method, path, body, headers).status == 403, (method, path)
    assert StorageKeys(served.storage).read() is None


def test_what_is_wrong_is_told_to_those_who_may_know_of_the_queue(keyed):
    served, secrets = keyed

    class Found:
        severity, what, to_do = "error", "no tracker", "start one"

        def __init__(self, queue):
            self.queue = queue

    served.storage.doctor = lambda: [Found("jobs"), Found("other")]
    found = ask(served, secrets["poster"], "GET", "/console/findings").json["findings"]
    assert {"severity": "error", "queue": "jobs", "what": "no tracker", "to_do": "start one"} in found
    assert "other" not in {one["queue"] for one in found}
    assert any("lost" in one["what"] for one in found), "a storage in memory"


def test_kmq_console_lets_in_whoever_has_its_address_once_and_serves_no_other(tmp_path):
    url = f"sqlite:///{tmp_path}/q.db"
    process = subprocess.Popen(
        [sys.executable, "-c", "from kmqpy.cli import main; main()", "console", url],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        address = process.stdout.readline().strip()
        base, _, token = address.partition("/console/#token=")
        port = int(base.rpartition(":")[2])

        def said(method, path, body=None, key=None):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            try:
                answer = connection.getresponse()
                return answer.status, answer.read()
            finally:
                connection.close()

        assert said("GET", "/console/")[0] == 200
        for path in ("/console/me", "/v1/queues", "/console/keys"):
            assert said("GET", path)[0] == 401
        assert said("GET", "/queue/1/jobs/size")[0] in (401, 403)
        assert said("POST", "/console/enter", {"token": "x"})[0] == 401
        assert said("POST", "/console/enter", {"token": ""})[0] == 401
        status, body = said("POST", "/console/enter", {"token": token})
        assert status == 200
        assert said("POST", "/console/enter", {"token": token})[0] == 401
        key = json.loads(body)["key"]
        assert said("GET", "/console/me", key=key)[0] == 200
        assert said("GET", "/console/keys", key=key)[0] == 501
        following = process.stdout.readline().strip()
        assert following.startswith(base)
        assert following != address
    finally:
        process.terminate()
        assert process.wait(20) == 0
        process.stdout.close()
