"""The znode that tells whether a commit happened, against a ZooKeeper of two lines."""

from types import SimpleNamespace

import pytest
from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError, RuntimeInconsistency

from kmqpy.zookeeper.queue.commit_records import CommitRecords


class Zk:
    """Of kazoo's client and its transactions what is needed."""

    def __init__(self):
        self.znodes = {}
        self.deleted = []

    def delete_async(self, path):
        self.deleted.append(path)

    def send(self, record, commit):
        """The results of a transaction that writes the record, and does one thing more."""
        self.operations = []
        record.write(self, commit)
        [write] = self.operations
        try:
            return [write(), True]
        except (NodeExistsError, NoNodeError, BadVersionError) as error:
            return [error, RuntimeInconsistency()]

    def create(self, path, data):
        def create():
            if path in self.znodes:
                raise NodeExistsError
            self.znodes[path] = (data, 0)
            return path

        self.operations.append(create)

    def set_data(self, path, data, version=-1):
        def set_data():
            if path not in self.znodes:
                raise NoNodeError
            if version not in (-1, self.znodes[path][1]):
                raise BadVersionError
            self.znodes[path] = (data, self.znodes[path][1] + 1)
            return SimpleNamespace(version=self.znodes[path][1])

        self.operations.append(set_data)

    def look(self, record):
        data, version = self.znodes.get(record.path, (b"", None))
        return record.read(data, None if version is None else SimpleNamespace(version=version))


@pytest.fixture
def zk():
    return Zk()


@pytest.fixture
def records(zk):
    return CommitRecords(zk, "/root")


def test_commits_one_after_another_share_a_znode_and_others_get_one_of_their_own(zk, records):
    first = records.borrow()
    other = records.borrow()
    assert first.note(zk.send(first, "1"))
    assert other.note(zk.send(other, "2"))
    records.give_back(first)
    again = records.borrow()
    assert again is first
    assert again.note(zk.send(again, "3"))
    assert [zk.look(one) for one in (first, other)] == ["3", "2"]
    records.delete()
    assert zk.deleted == [*zk.znodes]


@pytest.mark.parametrize("before", [[], ["a", "b"]])
def test_a_commit_is_refused_when_its_znode_has_changed(zk, records, before):
    """By its own request, whose answer was lost."""
    record = records.borrow()
    for commit in before:
        assert record.note(zk.send(record, commit))
    zk.send(record, "mine")  # no answer
    assert not record.note(zk.send(record, "mine"))
    assert zk.look(record) == "mine"
    assert record.note(zk.send(record, "next"))


def test_a_znode_that_somebody_deleted_is_made_again(zk, records):
    record = records.borrow()
    assert record.note(zk.send(record, "1"))
    zk.znodes.clear()
    assert not record.note(zk.send(record, "2"))
    assert zk.look(record) == ""
    assert record.note(zk.send(record, "2"))
    assert zk.look(record) == "2"


def test_another_reason_is_no_concern_of_the_record(zk, records):
    record = records.borrow()
    assert record.note([RuntimeInconsistency(), NoNodeError()])
    assert record.note(zk.send(record, "1"))
    assert record.note([RuntimeInconsistency(), NoNodeError()])
    assert record.note(zk.send(record, "2"))
