"""API keys of the gateway: permissions, stores, the keyring, limits."""

import asyncio
import json
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmqpy.errors import ConfigError, NotSupported, Unavailable
from kmqpy.gateway.keys import keyring
from kmqpy.gateway.keys.access import Access
from kmqpy.gateway.keys.keyring import ANYBODY, ApiKey, Keyring, digest_of, new_key, rotated
from kmqpy.gateway.keys.permissions import ROLES, parse_permission, permissions_of, permits_something
from kmqpy.gateway.keys.stores import KEYS_QUEUE, FileKeys, StorageKeys
from kmqpy.gateway.limits import Overloaded
from kmqpy.queue import Capabilities
from kmqpy.testing import ManualClock, memory_storage


def may(permission, action, queue):
    return parse_permission(permission).permits(action, queue)


@pytest.mark.parametrize(
    ("permission", "action", "queue", "permitted"),
    [
        ("queue|post|mails", "post", "mails", True),
        ("queue|post|mails", "poll", "mails", False),
        ("queue|post|mails", "post", "mails2", False),
        ("queue|post|mails", "post", "xmails", False),
        ("queue|post|mails*", "post", "mails:eu", True),
        ("queue|*|*", "get_status", "__x", True),
        ("*", "post", "any", True),
        ("queue", "post", "any", True),
        ("queue|post", "post", "any", True),
        ("queue|po*|a*b*c", "poll", "a-b-c", True),
        ("queue|po*|a*b*c", "poll", "a-c-b", False),
        ("system|post|mails", "post", "mails", False),
        (r"queue|post|a\*", "post", "a*", True),
        (r"queue|post|a\*", "post", "ab", False),
        (r"queue|post|a\|b", "post", "a|b", True),
        (r"queue|post|a\\", "post", "a\\", True),
        ("queue|post|a.c", "post", "abc", False),
    ],
)
def test_permissions(permission, action, queue, permitted):
    assert may(permission, action, queue) is permitted


@pytest.mark.parametrize(
    ("pattern", "queue", "permitted"),
    [
        ("*a*b", "a-b-b", True),
        ("a*a", "a", False),
        ("*aa*a", "aaa", True),
        ("*aa*aa", "aaa", False),
        ("**", "", True),
        ("*a*a*a*a*a*b", "a" * 16_000, False),
    ],
)
def test_patterns_match_as_a_whole_and_at_once(pattern, queue, permitted):
    assert may(f"queue|post|{pattern}", "post", queue) is permitted


@pytest.mark.parametrize("text", ["", "|", "queue||x", "a|b|c|d", "queue|post|", "queue|post|a\\x", "a\\"])
def test_what_is_no_permission_is_refused(text):
    with pytest.raises(ConfigError, match="permission"):
        parse_permission(text)


@given(st.text(), st.text(), st.text())
def test_any_text_is_a_permission_or_refused(text, action, queue):
    try:
        parse_permission(text).permits(action, queue)
    except ConfigError:
        return


@pytest.mark.parametrize(
    ("text", "something"),
    [
        ("queue|po*|x", True),
        ("*", True),
        ("queue", True),
        ("x", False),
        ("a|b|c", False),
        ("queue|read", False),
    ],
)
def test_whether_a_permission_permits_anything(text, something):
    assert permits_something(text) is something


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("action", ["post", "poll", "get_status", "other"])
@pytest.mark.parametrize("queue", ["jobs", "__jobs"])
def test_roles(role, action, queue):
    actions = {
        "queue_post": {"post", "get_status"},
        "queue_poll": {"poll", "get_status"},
        "queue_standard": {"post", "poll", "get_status"},
        "queue_admin": {"post", "poll", "get_status", "other"},
    }[role]
    expected = action in actions and (queue == "jobs" or role == "queue_admin")
    assert any(one.permits(action, queue) for one in permissions_of([role], [])) is expected


def test_unknown_roles_and_bad_limits_are_refused():
    with pytest.raises(ConfigError, match="queue_all"):
        permissions_of(["queue_all"], [])
    for bad in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="requests_per_s"):
            new_key("", ["queue_post"], [], requests_per_s=bad)


@pytest.fixture(params=["file", "storage"])
def store(request, tmp_path):
    if request.param == "file":
        yield FileKeys(tmp_path / "keys.json")
    else:
        with memory_storage() as storage:
            yield StorageKeys(storage)


def test_keys_are_stored_replaced_and_removed_and_no_secret_with_them(store, tmp_path):
    key, secret = new_key("mailer", ["queue_post"], ["queue|poll|a*"], requests_per_s=5)
    other, _ = new_key("", ["queue_admin"], [])
    store.put(key)
    store.put(other)
    assert sorted(store.read(), key=lambda one: one.id) == sorted([key, other], key=lambda one: one.id)
    changed, _ = rotated(key, keep_old=True)
    assert store.replace(changed)
    assert {one.id: one for one in store.read()} == {key.id: changed, other.id: other}
    assert store.remove(key.id)
    assert not store.remove(key.id)
    assert store.read() == [other]
    assert store.remove(other.id)
    assert store.read() == []
    for file in tmp_path.glob("keys.json*"):
        assert secret not in file.read_text()


def test_a_storage_without_keys_differs_from_one_whose_keys_are_gone():
    with memory_storage() as storage:
        store = StorageKeys(storage)
        assert store.read() is None
        assert not store.remove("x")
        key, _ = new_key("", ["queue_post"], [])
        store.put(key)
        store.remove(key.id)
        assert store.read() == []


def test_of_two_keys_of_one_id_the_later_one_counts():
    with memory_storage() as storage:
        store = StorageKeys(storage)
        key, _ = new_key("", ["queue_post"], [])
        store.put(key)
        changed, _ = rotated(key, keep_old=False)
        storage.open(KEYS_QUEUE).send(changed.to_json())  # put() was killed in between
        assert store.read() == [changed]
        again, _ = rotated(changed, keep_old=True)
        assert store.replace(again)
        assert len(storage.open(KEYS_QUEUE).peek()) == 1


def test_only_the_owner_can_read_the_file_and_a_damaged_one_is_named(tmp_path):
    path = tmp_path / "keys.json"
    store = FileKeys(path)
    assert store.read() == []
    store.put(new_key("", ["queue_post"], [])[0])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for damaged in ("", "[]", "{", '{"keys": 7}'):
        path.write_text(damaged)
        with pytest.raises(ConfigError):
            store.read()
    with pytest.raises(ConfigError, match="no/such"):
        FileKeys(tmp_path / "no/such/keys.json").put(new_key("", ["queue_post"], [])[0])


def test_a_key_of_a_newer_version_can_be_read():
    key, _ = new_key("", ["queue_post"], [])
    assert ApiKey.from_json(json.dumps({**json.loads(key.to_json()), "colour": "red"}).encode()) == key


def test_a_rotated_key_has_a_new_secret_and_keeps_the_old_one_if_asked():
    key, first = new_key("", ["queue_post"], [])
    both, second = rotated(key, keep_old=True)
    assert both.digests == (digest_of(second), digest_of(first))
    last, third = rotated(both, keep_old=False)
    assert last.digests == (digest_of(third),)
    assert last.created_ms > both.created_ms > key.created_ms


class Store:
    """What a keyring reads."""

    def __init__(self, *keys):
        self.keys = list(keys)
        self.error = None
        self.reads = 0

    async def read(self):
        self.reads += 1
        if self.error:
            raise self.error
        return self.keys


async def test_the_keyring_knows_revoked_keys_within_five_seconds():
    clock = ManualClock()
    key, secret = new_key("", ["queue_post"], [])
    store = Store(key)
    ring = Keyring(store.read, may_be_open=False, clock=clock)
    assert (await ring.who(secret)).id == key.id
    for wrong in (None, "", "x", secret + "x", digest_of(secret)):
        assert await ring.who(wrong) is None
    assert store.reads == 1
    store.keys = []
    clock.advance(4.9)
    assert await ring.who(secret) is None


async def test_while_the_store_is_silent_known_keys_stay_valid_and_without_any_nobody_gets_in():
    clock = ManualClock()
    key, secret = new_key("", ["queue_post"], [])
    store = Store(key)
    store.error = Unavailable("away")
    ring = Keyring(store.read, may_be_open=True, clock=clock)
    with pytest.raises(Unavailable):
        await ring.who(secret)
    store.error = None
    clock.advance(1)
    assert (await ring.who(secret)).id == key.id
    store.error = Unavailable("away")
    clock.advance(60)
    assert (await ring.who(secret)).id == key.id


async def test_nobody_waits_for_long_for_a_store_that_hangs(monkeypatch):
    monkeypatch.setattr(keyring, "_LONG_PATIENCE_S", 0.05)

    class Hanging(Store):
        answers = asyncio.Event()

        async def read(self):
            await self.answers.wait()
            return await super().read()

    clock = ManualClock()
    key, secret = new_key("", ["queue_post"], [])
    store = Hanging(key)
    ring = Keyring(store.read, may_be_open=False, clock=clock)
    with pytest.raises(Unavailable, match="in time"):
        await ring.who(secret)
    store.answers.set()
    assert (await ring.who(secret)).id == key.id
    store.answers.clear()
    clock.advance(60)
    async with asyncio.timeout(30):
        assert (await ring.who(secret)).id == key.id
    store.keys = []
    store.answers.set()
    while await ring.who(secret):  # the reading goes on meanwhile, and ends now
        await asyncio.sleep(0)
    assert store.reads == 2


async def test_nobody_waits_for_a_store_that_has_just_failed(monkeypatch):
    monkeypatch.setattr(keyring, "_PATIENCE_S", 0.0)

    class Hanging(Store):
        async def read(self):
            return await (super().read() if self.reads < 2 else asyncio.Event().wait())

    clock = ManualClock()
    key, secret = new_key("", ["queue_post"], [])
    store = Hanging(key)
    ring = Keyring(store.read, may_be_open=False, clock=clock)
    assert await ring.who(secret)
    store.error = Unavailable("away")
    clock.advance(60)
    assert await ring.who(secret)
    clock.advance(2)
    async with asyncio.timeout(10):
        monkeypatch.setattr(keyring, "_LONG_PATIENCE_S", 30.0)
        assert await ring.who(secret)


@pytest.mark.parametrize(("idle_s", "old_ones_decide"), [(4.5, True), (3600, False)])
async def test_after_a_quiet_time_a_store_that_takes_a_moment_decides(monkeypatch, idle_s, old_ones_decide):
    monkeypatch.setattr(keyring, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(keyring, "_LONG_PATIENCE_S", 30.0)

    class Slow(Store):
        async def read(self):
            await asyncio.sleep(0.05)
            return await super().read()

    clock = ManualClock()
    revoked, secret = new_key("", ["queue_post"], [])
    new, new_secret = new_key("", ["queue_post"], [])
    store = Slow(revoked)
    ring = Keyring(store.read, may_be_open=False, clock=clock)
    assert await ring.who(secret)
    store.keys = [new]
    clock.advance(idle_s)
    assert bool(await ring.who(secret)) is old_ones_decide
    assert bool(await ring.who(new_secret)) is not old_ones_decide


@pytest.mark.parametrize("may_be_open", [True, False])
async def test_everybody_may_do_everything_until_the_first_key_if_that_is_wanted(may_be_open):
    clock = ManualClock()
    store = Store()
    store.keys = None
    ring = Keyring(store.read, may_be_open=may_be_open, clock=clock)
    assert await ring.who(None) is (ANYBODY if may_be_open else None)
    store.keys = []
    clock.advance(5)
    assert await ring.who(None) is None


async def test_a_key_s_limits():
    clock = ManualClock()
    key, secret = new_key("", ["queue_post"], [], requests_per_s=2, bytes_per_s=100)
    with memory_storage() as storage, ThreadPoolExecutor(1) as threads:
        store = StorageKeys(storage)
        store.put(key)
        access = Access(store, threads, may_be_open=False, clock=clock)
        sender = await access(secret)
        await access(secret)
        with pytest.raises(Overloaded, match="requests_per_s") as raised:
            await access(secret)
        assert 0 < raised.value.retry_after_s <= 1
        assert raised.value.why == "key"
        clock.advance(1)
        await access(secret)
        access.spend_bytes(sender, 250)  # what is there already is counted, not refused
        with pytest.raises(Overloaded, match="bytes_per_s"):
            access.spend_bytes(sender, 1)
        clock.advance(2)
        access.spend_bytes(sender, 1)


def test_a_storage_that_can_t_acknowledge_unseen_messages_keeps_no_keys():
    class Kafka:
        capabilities = Capabilities(immediate=False)

    with pytest.raises(NotSupported, match="--keys"):
        StorageKeys(Kafka())


def test_what_is_no_key_in_a_file_harms_no_other_and_stays(tmp_path):
    path = tmp_path / "keys.json"
    store = FileKeys(path)
    key, other = (new_key("", ["queue_post"], [])[0] for _ in range(2))
    store.put(key)
    entries = json.loads(path.read_text())["keys"]
    bad = [{}, 7, {"id": "a", "digests": ["b"], "roles": ["of a newer version"]}]
    path.write_text(json.dumps({"keys": [*bad, *entries]}))
    assert store.read() == [key]
    store.put(other)
    assert store.remove(key.id)
    assert store.read() == [other]
    assert json.loads(path.read_text())["keys"][:3] == bad
    assert store.remove("a")


def test_a_key_that_is_revoked_while_it_is_rotated_stays_revoked(store):
    key, _ = new_key("", ["queue_post"], [])
    store.put(key)
    changed, _ = rotated(key, keep_old=True)
    assert store.remove(key.id)
    assert not store.replace(changed)
    assert store.read() == []


@pytest.mark.parametrize("before", ["send", "ack"])
def test_whoever_revokes_a_key_at_the_same_time_wins(monkeypatch, before):
    with memory_storage() as storage:
        store = StorageKeys(storage)
        key, _ = new_key("", ["queue_post"], [])
        store.put(key)
        queue_type = type(storage.open(KEYS_QUEUE))
        call = getattr(queue_type, before)
        revoked = []

        def revoke_first(queue, *args, **options):
            if not revoked:
                revoked.append(1)
                assert store.remove(key.id)
            return call(queue, *args, **options)

        monkeypatch.setattr(queue_type, before, revoke_first)
        store.replace(rotated(key, keep_old=True)[0])
        assert revoked
        assert store.read() == []


def test_a_revocation_that_saw_only_the_former_key_looks_again(monkeypatch):
    with memory_storage() as storage:
        store = StorageKeys(storage)
        key, _ = new_key("", ["queue_post"], [])
        store.put(key)
        queue_type = type(storage.open(KEYS_QUEUE))
        ack, acked = queue_type.ack, []

        def rotate_first(queue, *args, **options):
            if not acked:
                acked.append(1)
                queue.send(rotated(key, keep_old=True)[0].to_json())  # as replace() does, before it looks
            return ack(queue, *args, **options)

        monkeypatch.setattr(queue_type, "ack", rotate_first)
        assert store.remove(key.id)
        assert store.read() == []
