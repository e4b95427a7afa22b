"""What does not need servers."""

import pytest

from kmqpy.admin import Admin
from kmqpy.config import Connection, QueueSettings
from kmqpy.errors import QueueNotFound, Unavailable
from kmqpy.registry import RegisteredQueue
from kmqpy.topics import TopicInfo, dead_letter_queue


class FakeRegistry:
    def __init__(self, *queues):
        self.known = {queue.name: queue for queue in queues}

    def get(self, name):
        if name not in self.known:
            raise QueueNotFound(name)
        return RegisteredQueue(self.known[name], 1)

    def remove(self, name, _timeout, *, released=lambda: None):
        released()
        del self.known[name]


class FakeTopics:
    """The first deletion fails when `gone` are deleted."""

    def __init__(self, *names, gone):
        self.names = set(names)
        self.gone = gone

    def describe(self, names):
        return {name: TopicInfo(name, "id", 1, 1) for name in names if name in self.names}

    def delete(self, queue):
        dead = dead_letter_queue(queue)
        fails = self.gone is not None
        self.names -= self.gone if fails else {queue.name, queue.markers_topic, dead.name, dead.markers_topic}
        self.gone = None
        if fails:
            raise Unavailable("a broker is away")


CUSTOM = QueueSettings(name="q", markers_topic="marks", dead_letter_topic="dead")


@pytest.mark.parametrize("gone", [{"q"}, {"q", "marks"}, set()])
@pytest.mark.parametrize("registered", [True, False])
def test_a_deletion_that_failed_goes_on_until_no_topic_is_left(registered, gone):
    """Only the registry knows names that are not the usual ones."""
    settings = CUSTOM if registered else QueueSettings(name="q")
    dead = dead_letter_queue(settings)
    topics = FakeTopics("q", settings.markers_topic, dead.name, dead.markers_topic, "other", gone=gone)
    registry = FakeRegistry(*([settings] if registered else []))
    admin = Admin(Connection())
    admin._registry_, admin._topics_ = registry, topics
    with pytest.raises(Unavailable):
        admin.delete_queue("q")
    admin.delete_queue("q")
    assert topics.names == {"other"}
    assert registry.known == {}
    with pytest.raises(QueueNotFound):
        admin.delete_queue("q")
