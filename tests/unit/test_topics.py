"""What does not need a broker."""

from types import SimpleNamespace

from kmqpy.config import Connection, QueueSettings
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
