"""Trackers over a registry with damaged, copied or foreign znodes (rule R25)."""

from kazoo.security import make_digest_acl
from leadership_support import ALL, PARTITIONS, owned, stop_thread, until

from kmqpy.kafka.admin.registry_entries import TrackerInfo
from kmqpy.kafka.settings import QueueSettings


def test_unreadable_settings_keep_the_last_good_ones(registry, join, zk, root):
    registry.register(QueueSettings(name="q"), 2)
    registry.register(QueueSettings(name="other"), 1)
    a = join("a")
    until(lambda: len(owned(a)) == 3)
    zk.set(f"{root}/queues/q", b"{")
    registry.register(QueueSettings(name="late"), 1)
    until(lambda: len(owned(a)) == 4)
    assert a.snapshot().queues["q"].settings == QueueSettings(name="q")


def test_r25_a_leader_without_a_session_is_replaced(registry, join, zk, root, caplog):
    """From a backup, or made by hand: nobody leads, and the partition was never tracked."""
    registry.register(QueueSettings(name="q"), 2)
    leader = f"{root}/queues/q/partitions/0/leader"
    zk.create(leader, b"\xff a copy")
    a = join("a", takeover_delay=60.0)
    until(lambda: owned(a) == {("q", 0), ("q", 1)})
    assert zk.get(leader)[1].ephemeralOwner == a._zk.client_id[0]
    assert f"{leader} belonged to no session; replaced" in caplog.text


def test_r25_a_leader_that_cannot_be_replaced_is_named_and_holds_up_no_other(registry, join, zk, root):
    registry.register(QueueSettings(name="q"), 3)
    leader = f"{root}/queues/q/partitions/0/leader"
    zk.create(f"{leader}/below", makepath=True)
    a = join("a")
    until(lambda: owned(a) == {("q", 1), ("q", 2)} and a.snapshot().problems)
    assert [
        problem for problem in a.snapshot().problems if leader in problem and "kmq doctor --fix" in problem
    ]
    registry.remove_unusable_znodes(registry.unusable_znodes("q"))
    until(lambda: len(owned(a)) == 3 and not a.snapshot().problems)


def test_r25_members_without_a_session_count_for_nothing(registry, join, zk, root):
    registry.register(QueueSettings(name="q"), PARTITIONS)
    copy = TrackerInfo("copy", "host", 1, None, kafka_ok=True)
    zk.create(f"{root}/trackers/copy", copy.to_json(), makepath=True)
    zk.create(f"{root}/trackers/a", copy.to_json())  # our own, from before
    a = join("a", takeover_delay=60.0)
    until(lambda: owned(a) == ALL and a.may_redeliver())
    assert [tracker.id for tracker in registry.trackers()] == ["a"]


def test_r25_what_cannot_be_read_is_named_and_stops_nothing_else(registry, join, zk, root):
    for name in ("acl", "bad", "gap", "good"):
        registry.register(QueueSettings(name=name), 3)
    zk.set_acls(f"{root}/queues/acl", [make_digest_acl("other", "secret", all=True)])
    zk.set(f"{root}/queues/bad", b"\xff")
    zk.delete(f"{root}/queues/gap/partitions/1")
    for number in ("0007", "٣", "99999999"):
        zk.create(f"{root}/queues/good/partitions/{number}")
    zk.create(f"{root}/queues/no queue")
    zk.create(f"{root}/trackers/bad", b"[" * 100_000, makepath=True, ephemeral=True)
    a = join("a")
    everything = {("good", 0), ("good", 1), ("good", 2), ("gap", 0), ("gap", 2)}
    until(lambda: owned(a) == everything and len(a.snapshot().problems) == 3, a)
    for what in (
        f"{root}/queues/acl its ACL",
        f"{root}/queues/bad can't be read",
        f"{root}/queues/gap/partitions lacks 1; run: kmq queue create gap",
    ):
        assert [problem for problem in a.snapshot().problems if problem.startswith(what)]
    registry.register(QueueSettings(name="gap"), 3)
    until(lambda: ("gap", 1) in owned(a))


def test_r25_settings_are_known_by_what_they_say_not_by_their_version(registry, join):
    """A ZooKeeper that came back empty gives the same versions to other settings."""
    registry.register(QueueSettings(name="q"), 1)
    a = join("a")
    until(lambda: "q" in a.snapshot().queues)
    stop_thread(a)
    tree = a._reader.read(a._znodes, a._planner.concerning_us)
    path = a._paths.queue("q")
    _, stat = a._znodes.data([path])[path]
    a._znodes._values[path] = (QueueSettings(name="q", max_redeliveries=9).to_json(), stat)
    a._reader._last = None
    assert tree.queues["q"].settings.max_redeliveries == 3
    assert a._reader.read(a._znodes, a._planner.concerning_us).queues["q"].settings.max_redeliveries == 9


def test_r25_only_a_thread_that_has_died_needs_a_restart(join):
    a = join("a")
    assert a.alive()
    stop_thread(a)
    a._closing.clear()
    assert not a.alive()
    a.close()
    assert a.alive()
