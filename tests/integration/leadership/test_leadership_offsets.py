"""Offsets of partitions that a tracker stores in ZooKeeper while it leads them."""

from kazoo.security import make_digest_acl
from leadership_support import epochs, owned, until

from kmqpy.kafka.admin.registry_entries import StoredOffset
from kmqpy.kafka.settings import QueueSettings


def test_offsets_are_read_as_they_were_written(registry, join, zk, root):
    registry.register(QueueSettings(name="q"), 2)
    a = join("a")
    until(lambda: len(owned(a)) == 2)
    assert a.read_offset("q", 0) is None
    first, second = StoredOffset(1, "t", 10), StoredOffset(2, "t", 20)
    assert a.write_offsets({("q", 0): first})
    assert a.read_offset("q", 0) == first
    assert a.write_offsets({("q", 0): second})
    # Someone else's write between ours: BadVersion, read again, and written.
    zk.set(f"{root}/queues/q/partitions/0/offset", b"?")
    assert a.write_offsets({("q", 0): second, ("q", 1): first, ("gone", 0): first}) == {
        ("q", 0),
        ("q", 1),
    }
    assert registry.offsets("q") == {0: second, 1: first}
    zk.delete(f"{root}/queues/q/partitions/0/offset")
    assert a.write_offsets({("q", 0): first})
    assert registry.offsets("q")[0] == first
    zk.set(f"{root}/queues/q/partitions/0/offset", b"?")
    assert a.read_offset("q", 0) is None
    assert a.write_offsets({("q", 0): first})


def test_who_lost_the_znode_stores_nothing(registry, join, zk, root):
    registry.register(QueueSettings(name="q"), 1)
    a = join("a")
    until(lambda: owned(a))
    assert a.write_offsets({("q", 0): StoredOffset(5, "t", 1)})
    assert a.verify("q", 0)
    before = epochs(a)["q", 0]
    leader = f"{root}/queues/q/partitions/0/leader"
    transaction = zk.transaction()
    transaction.delete(leader)
    transaction.create(leader, b"other", ephemeral=True)
    transaction.commit()
    assert not a.verify("q", 0)
    assert not a.write_offsets({("q", 0): StoredOffset(4, "t", 1)})
    until(lambda: not owned(a))
    assert registry.offsets("q") == {0: StoredOffset(5, "t", 1)}
    zk.delete(leader)
    until(lambda: owned(a))
    assert epochs(a)["q", 0] > before


def test_offsets_written_together_need_no_look_at_each_leader(registry, join, zk, root):
    registry.register(QueueSettings(name="q"), 3)
    a = join("a")
    until(lambda: len(owned(a)) == 3)
    assert a.write_offsets({("q", p): StoredOffset(1, "t", 1) for p in range(3)}) == owned(a)
    calls = []
    a._offsets._ours = lambda pending: calls.append(pending) or {}
    assert a.write_offsets({("q", p): StoredOffset(2, "t", 1) for p in range(3)}) == owned(a)
    assert not any(calls)
    # A write of someone else: none of the transaction is done, and each is looked at.
    zk.set(f"{root}/queues/q/partitions/0/offset", b"?")
    assert a.write_offsets({("q", p): StoredOffset(3, "t", 1) for p in range(3)}) == set()
    assert len(calls[-1]) == 3
    # So is one whose leader znode is not ours any more, as the watch tells.
    transaction = zk.transaction()
    transaction.delete(f"{root}/queues/q/partitions/1/leader")
    transaction.create(f"{root}/queues/q/partitions/1/leader", b"other", ephemeral=True)
    transaction.commit()
    assert not a.verify("q", 1)
    assert a.write_offsets({("q", p): StoredOffset(4, "t", 1) for p in (1, 2)}) == {("q", 2)}
    assert list(calls[-1]) == [("q", 1)]
    assert registry.offsets("q")[1] == StoredOffset(2, "t", 1)


def test_r25_an_offset_that_may_not_be_written_holds_up_no_other(registry, join, zk, root, caplog):
    registry.register(QueueSettings(name="q"), 2)
    path = f"{root}/queues/q/partitions/0/offset"
    zk.create(path, b"?", [make_digest_acl("other", "secret", all=True)])
    a = join("a")
    until(lambda: len(owned(a)) == 2)
    stored = StoredOffset(1, "t", 10)
    assert a.write_offsets({("q", 0): stored, ("q", 1): stored}) == {("q", 1)}
    assert f"{path} is not stored" in caplog.text
