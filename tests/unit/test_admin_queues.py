"""What does not need servers."""

from types import SimpleNamespace

import pytest

from kmqpy.errors import AccessDenied, ConfigError, KmqError, QueueNotFound, Unavailable
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.admin.queue_alteration import QueueAlteration
from kmqpy.kafka.admin.registry_entries import RegisteredQueue
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.settings_mirror import Records, SettingsMirror
from kmqpy.kafka.topic_names import topics_of
from kmqpy.kafka.topics import QueueTopics, TopicInfo
from kmqpy.zookeeper.settings import ZooKeeperConnection


class FakeRegistry:
    def __init__(self, *queues, damaged=()):
        self.known = {queue.name: queue for queue in queues}
        self.damaged = damaged

    def get(self, name):
        if name not in self.known:
            raise QueueNotFound(name)
        return RegisteredQueue(self.known[name], 1)

    def lanes(self, _name):
        return []

    def every_queue(self):
        return list(self.known.values()), list(self.damaged)

    def mark_deleting(self, name):
        self.get(name)

    def remove(self, name, _timeout, *, on_released=lambda: None):
        on_released()
        del self.known[name]


class FakeTopics:
    """The first deletion fails when `gone` are deleted."""

    def __init__(self, *names, gone=None):
        self.there = set(names)
        self.gone = gone

    def names(self):
        return self.there

    def describe(self, names):
        return {name: TopicInfo(name, "id", 1, 1) for name in names if name in self.there}

    def offsets(self, _topic, partitions):
        return dict.fromkeys(partitions, (3, 10))

    def delete(self, topics):
        fails = self.gone is not None
        self.there -= self.gone if fails else set(topics)
        self.gone = None
        if fails:
            raise Unavailable("a broker is away")


CUSTOM = QueueSettings(name="q", markers_topic="marks", dead_letter_topic="dead")


def admin_of(registry, topics):
    admin = Admin(KafkaConnection(), ZooKeeperConnection())
    admin._context._registry, admin._context._topics = registry, topics
    return admin


@pytest.mark.parametrize("gone", [{"q"}, {"q", "marks"}, set()])
def test_a_deletion_that_failed_goes_on_until_no_topic_is_left(gone):
    """Only the registry knows names that are not the usual ones."""
    topics = FakeTopics(*topics_of(CUSTOM), "other", gone=gone)
    registry = FakeRegistry(CUSTOM)
    admin = admin_of(registry, topics)
    with pytest.raises(Unavailable):
        admin.delete_queue("q")
    admin.delete_queue("q")
    assert topics.there == {"other"}
    assert registry.known == {}
    with pytest.raises(QueueNotFound):
        admin.delete_queue("q")


def test_a_queue_is_named_by_its_settings_too_and_by_nothing_else():
    registry = FakeRegistry(CUSTOM)
    admin = admin_of(registry, FakeTopics(*topics_of(CUSTOM)))
    assert admin.deletion(CUSTOM).queue == "q"
    admin.delete_queue(CUSTOM)
    assert registry.known == {}
    for call in (
        admin.delete_queue,
        admin.deletion,
        admin.describe_queue,
        admin.follow_topic,
    ):
        with pytest.raises(ConfigError, match="queue: int is neither a name nor QueueSettings"):
            call(7)
    with pytest.raises(ConfigError, match="type QueueSettings is not text"):
        admin.alter_queue(CUSTOM, max_redeliveries=1)


PLAIN = QueueSettings(name="q")
LANED = QueueSettings(name="q", retry_lane=True, priorities=2)


def test_lanes_get_what_somebody_has_set_for_the_topic_at_the_second_try_too():
    class NewTopics(FakeTopics):
        """A broker shows no settings of new topics yet; the first is refused."""

        set, refuses = dict[str, dict[str, str]](), True

        def describe(self, names, *, with_config=False):
            shown = [name for name in names if name in self.there and (name == "q" or not with_config)]
            return {
                name: TopicInfo(name, "id", 1, 1, {"flush.ms": "9", "retention.ms": "-1"}) for name in shown
            }

        def own_config(self, name):
            return {"flush.messages": "1"} if name == "q" else {}

        def create(self, settings, *_):
            self.there |= set(topics_of(settings))

        def configure(self, topic, settings):
            if self.refuses:
                self.refuses = False
                raise AccessDenied
            self.set[topic] = settings

        def grow(self, *_):
            pass

    registry, topics = FakeRegistry(PLAIN), NewTopics(*topics_of(PLAIN))
    registry.register = lambda *_, **__: True
    context = SimpleNamespace(registry=registry, topics=topics, mirror_settings=lambda settings: settings)
    with pytest.raises(AccessDenied):
        QueueAlteration(context).alter("q", None, None, {"retry_lane": True})
    QueueAlteration(context).alter("q", None, None, {"retry_lane": True})
    set_for = {"retention.ms": "-1", "flush.messages": "1"}
    assert topics.set == {"q__retry": set_for, "q__retry__markers": set_for}


@pytest.mark.parametrize(
    ("name", "topics", "deleted"),
    [
        ("q", topics_of(PLAIN), set(topics_of(PLAIN))),
        ("payments", ["payments"], None),  # looks like nobody's queue
        ("q", ["q", "q__undelivered"], {"q__undelivered"}),
        ("q", topics_of(LANED), set(topics_of(LANED))),
        ("q", ["q__retry", "q__retry__markers", "q__priority1"], {"q__retry", "q__retry__markers"}),
        ("jobs", topics_of(QueueSettings(name="jobs")), None),
        ("jobs__undelivered", topics_of(QueueSettings(name="jobs")), None),
        ("dead", ["dead", "dead__markers"], None),
    ],
)
def test_only_leftovers_of_no_registered_queue_are_deleted_and_only_as_such(name, topics, deleted):
    registered = QueueSettings(name="jobs"), QueueSettings(name="orders", dead_letter_topic="dead")
    there = FakeTopics(*topics, "else")
    admin = admin_of(FakeRegistry(*registered), there)
    if name != "jobs":
        with pytest.raises(QueueNotFound, match="not registered"):
            admin.delete_queue(name)
    if deleted is None:
        with pytest.raises(KmqError):
            admin.delete_queue(name, leftovers=True)
        deleted = set()
    else:
        assert admin.delete_queue(name, leftovers=True).topics == dict.fromkeys(sorted(deleted), 7)
    assert there.there == {*topics, "else"} - deleted


def test_topics_of_another_queue_are_kept_until_that_is_deleted():
    other = QueueSettings(name="o", dead_letter_topic="q__undelivered")
    topics = FakeTopics(*topics_of(PLAIN), *topics_of(other))
    admin = admin_of(FakeRegistry(PLAIN, other), topics)
    kept = {"q__undelivered": "o", "q__undelivered__markers": "o"}
    found = admin.deletion("q")
    assert (set(found.topics), found.kept) == ({"q", "q__markers"}, kept)
    assert admin.delete_queue("q") == found
    assert topics.there == set(topics_of(other))
    admin.delete_queue("o")
    assert topics.there == set()


def test_topics_of_a_queue_of_another_root_are_kept(monkeypatch):
    """Of the same name, for example; trackers of both roots may serve them."""
    other = QueueSettings(name="q", dead_letter_topic="dead")
    monkeypatch.setattr(SettingsMirror, "records", lambda *_: Records(others=(other,)))
    topics = FakeTopics(*topics_of(PLAIN), *topics_of(other))
    found = admin_of(FakeRegistry(PLAIN), topics).delete_queue("q")
    assert found.kept == dict.fromkeys(("q", "q__markers"), "q of another ZooKeeper root")
    assert topics.there == set(topics_of(other))


def test_who_may_not_read_the_records_of_other_roots_deletes_all_the_same(monkeypatch):
    def refuse(*_):
        raise AccessDenied("no right to read kmq.queues")

    monkeypatch.setattr(SettingsMirror, "records", refuse)
    topics = FakeTopics(*topics_of(PLAIN))
    admin_of(FakeRegistry(PLAIN), topics).delete_queue("q")
    assert topics.there == set()


def test_while_it_is_not_known_what_another_queue_uses_nothing_is_deleted():
    topics = FakeTopics(*topics_of(PLAIN), "left", "left__markers")
    admin = admin_of(FakeRegistry(PLAIN, damaged=["damaged"]), topics)
    for name, leftovers in (("q", False), ("left", True)):
        with pytest.raises(ConfigError, match="kmq queue create damaged"):
            admin.delete_queue(name, leftovers=leftovers)
    assert len(topics.there) == 6
    own = admin_of(FakeRegistry(PLAIN, damaged=["q"]), topics)
    assert set(own.delete_queue("q").topics) == set(topics_of(PLAIN))


@pytest.mark.parametrize("name", ["jobs__markers", "jobs__undelivered"])
def test_names_of_other_topics_are_refused_but_where_a_queue_has_one(name, monkeypatch):
    made = []
    topics = FakeTopics()
    monkeypatch.setattr(topics, "create", lambda one, *_, **__: made.append(one.name), raising=False)
    admin = admin_of(FakeRegistry(), topics)
    for queue in (name, QueueSettings(name=name)):
        with pytest.raises(ConfigError, match=f"name: '{name}' is that of another topic of queue 'jobs'"):
            admin.create_queue(queue)
    assert made == []
    registry = FakeRegistry(QueueSettings(name=name))
    monkeypatch.setattr(registry, "register", lambda *_: None, raising=False)
    monkeypatch.setattr(
        topics,
        "create",
        lambda settings, *_, **__: QueueTopics(info := TopicInfo(settings.name, "", 1, 1), info, None),
    )
    assert admin_of(registry, topics).create_queue(name).partitions == 1


@pytest.mark.parametrize(
    ("there", "new", "field"),
    [
        ({}, {"markers_topic": "a__markers"}, "markers_topic"),
        ({}, {"dead_letter_topic": "a__undelivered"}, "dead_letter_topic"),
        ({}, {"dead_letter_topic": "a"}, "dead_letter_topic"),
        ({}, {"markers_topic": "a__undelivered__markers"}, "markers_topic"),
        ({"markers_topic": "b"}, {}, "name"),
        ({"dead_letter_topic": "b"}, {}, "name"),
        ({"markers_topic": "b__markers"}, {}, "markers_topic"),
        ({"dead_letter_topic": "b__undelivered"}, {}, "dead_letter_topic"),
        ({"markers_topic": "b__undelivered__markers"}, {}, "dead_letter_topic"),
        ({}, {"markers_topic": "b__undelivered__markers"}, "markers_topic"),  # its own dead letters'
    ],
)
def test_a_topic_of_another_queue_is_refused_from_either_side(there, new, field):
    admin = admin_of(FakeRegistry(QueueSettings(name="a", **there)), FakeTopics())
    with pytest.raises(ConfigError, match=f"^{field}: "):
        admin.create_queue(QueueSettings(name="b", **new))


@pytest.mark.parametrize("name", ["q__undelivered", "q__markers", "dead"])
def test_another_topic_of_a_queue_is_not_purged_as_one(name):
    other = QueueSettings(name="o", dead_letter_topic="dead")
    admin = admin_of(FakeRegistry(PLAIN, other), FakeTopics(*topics_of(PLAIN), *topics_of(other)))
    with pytest.raises(ConfigError, match="topic of queue"):
        admin.purge(name)
