"""What does not need a broker."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from kmqpy import kafka
from kmqpy.config import Connection, QueueSettings
from kmqpy.errors import AccessDenied, KmqError, Unavailable
from kmqpy.topics import TopicInfo, Topics, dead_letter_queue


def test_create_believes_the_broker_that_knows_the_new_topics(monkeypatch):
    """Another one may not have been told yet: with three brokers that happened every other time."""
    queue = QueueSettings(name="q")
    dead = dead_letter_queue(queue)
    names = (queue.name, queue.markers_topic, dead.name, dead.markers_topic)
    known = {name: TopicInfo(name, "id", 1, 1) for name in names}
    topics = Topics(Connection(bootstrap="127.0.0.1:1"))
    topics._admin = SimpleNamespace(create_topics=lambda *_, **__: dict.fromkeys(names))
    monkeypatch.setattr(topics, "_result", lambda *_, **__: None)
    monkeypatch.setattr(topics, "brokers", lambda: 1)
    answers = iter([known, {}, known])
    monkeypatch.setattr(topics, "describe", lambda _names: next(answers, {}))
    assert topics.create(queue).queue.name == "q"


def test_describe_looks_for_the_controller_again_when_it_does_not_answer(monkeypatch):
    """Otherwise librdkafka waits for a dead broker, 10 s, and trackers took that for the end of Kafka."""
    topics = Topics(Connection(bootstrap="127.0.0.1:1"))
    asked: list[str] = []

    def describe(_names, timeout_s, *, with_config):
        asked.append("describe")
        if len(asked) == 1:
            assert timeout_s < 3
            raise Unavailable("timed out waiting for controller")
        return {"q": TopicInfo("q", "id", 1, 1)}

    monkeypatch.setattr(topics, "_describe", describe)
    monkeypatch.setattr(kafka, "metadata", lambda *_: asked.append("metadata"))
    assert set(topics.describe(["q"])) == {"q"}
    assert asked == ["describe", "metadata", "describe"]


def test_who_is_not_let_in_does_not_ask_again(monkeypatch):
    topics = Topics(Connection(bootstrap="127.0.0.1:1"))

    def describe(*_, **__):
        raise AccessDenied("no")

    monkeypatch.setattr(topics, "_describe", describe)
    with pytest.raises(AccessDenied):
        topics.describe(["q"])


@pytest.mark.parametrize("moves", [2, 1_000_000])
def test_records_are_deleted_although_a_partition_has_just_moved(moves, monkeypatch):
    topics = Topics(Connection(bootstrap="127.0.0.1:1"), timeout_s=1)
    asked: list[list[int]] = []

    def delete_records(places, **_):
        asked.append([place.partition for place in places])
        return {TopicPartition(p.topic, p.partition): answer(p.partition) for p in places}

    def answer(partition):
        future: Future = Future()
        if partition == 1 and len(asked) <= moves:
            future.set_exception(KafkaException(KafkaError(KafkaError.NOT_LEADER_FOR_PARTITION)))
        else:
            future.set_result(7)
        return future

    topics._admin = SimpleNamespace(delete_records=delete_records, poll=lambda _: None)
    monkeypatch.setattr(kafka, "metadata", lambda *_: None)
    if moves > 2:
        with pytest.raises(KmqError, match="delete records of q"):
            topics.delete_records("q", {0: 7, 1: 7})
        return
    topics.delete_records("q", {0: 7, 1: 7})
    assert asked == [[0, 1], [1], [1]]
