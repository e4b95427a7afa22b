"""Which of the markers are read, without a broker."""

from types import SimpleNamespace

import pytest

from kmqpy import log_reader, stats
from kmqpy.config import Connection, QueueSettings
from kmqpy.topics import QueueTopics, TopicInfo

QUEUE = QueueSettings(name="q")


@pytest.mark.parametrize(
    ("committed", "start"),
    [
        ({0: (500, 700)}, 700),
        ({0: (500, 20)}, 100),  # the log begins later
        ({0: (500, 1_000)}, 1_000),
        ({0: (500, 1_001)}, 100),  # of a markers topic that is no more
        ({0: (500, None)}, 100),  # another kind of client
        ({}, 100),
    ],
)
def test_who_only_peeks_reads_markers_from_where_the_commit_says(committed, start, monkeypatch):
    topic = TopicInfo("q", "id", 1, 1)
    topics = QueueTopics(topic, TopicInfo(QUEUE.markers_topic, "id", 1, 1), None)
    read = {}
    monkeypatch.setattr(stats, "Topics", lambda _: SimpleNamespace(check=lambda _: topics))
    monkeypatch.setattr(stats, "committed_offsets", lambda *_: committed)
    monkeypatch.setattr(log_reader, "bounds", lambda *_: {0: (100, 1_000)})
    monkeypatch.setattr(log_reader, "scan", lambda _, name, starts, *__, **___: read.update({name: starts}))
    assert stats.waiting_records(Connection(), QUEUE, limit=1) == []
    assert read == {QUEUE.markers_topic: {0: start}, "q": {0: committed.get(0, (0,))[0]}}
