"""Administration of topics by a cluster that fails in orders which a real one can't be brought to."""

import math
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupState, KafkaError, KafkaException, TopicCollection, TopicPartition

from kmqpy.errors import AccessDenied, ConfigError, KmqError, TopicError, Unavailable
from kmqpy.kafka import kafka_errors, librdkafka
from kmqpy.kafka.retention import DEFAULT_RETENTION_MS
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topic_identity import TopicIds, TopicWatch
from kmqpy.kafka.topic_names import dead_letter_queue, topics_of
from kmqpy.kafka.topics import GroupMember, Topics

QUEUE = QueueSettings(name="q")
DEAD = dead_letter_queue(QUEUE)
NAMES = (QUEUE.name, QUEUE.markers_topic, DEAD.name, DEAD.markers_topic)
TIMEOUT_S = 5.0


class FakeClock:
    """Time passes in sleep() only."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def wall_ms(self) -> int:
        return int(self.now * 1000)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@dataclass
class Fault:
    """The next answer to `op`; `done`: it was carried out all the same. `only`: just for that key."""

    op: str
    code: int
    done: bool = False
    only: Any = None


@dataclass
class FakeAdmin:
    """AdminClient before a cluster of `topics` (name to partitions); each fault once, `always` for ever."""

    topics: dict[str, int] = field(default_factory=dict)
    faults: deque[Fault] = field(default_factory=deque)
    always: Fault | None = None
    asked: list[tuple[str, list[Any]]] = field(default_factory=list)
    brokers: int = 1
    replication: dict[str, int] = field(default_factory=dict)
    configs: dict[str, dict[str, str]] = field(default_factory=dict)

    def answer(self, op: str, keys: Iterable[Any], carry_out: Callable[[Any], Any]) -> dict[Any, Future]:
        keys = list(keys)
        self.asked.append((op, keys))
        fault = self.always if self.always and self.always.op == op else None
        if self.faults and self.faults[0].op == op:
            fault = self.faults.popleft()
        found = {}
        for key in keys:
            future = found[key] = Future()
            try:
                hit = fault is not None and (fault.only is None or fault.only == key)
                result = None if hit and not fault.done else carry_out(key)
                if hit:
                    raise KafkaException(KafkaError(fault.code))
                future.set_result(result)
            except KafkaException as exception:
                future.set_exception(exception)
        return found

    def of(self, op: str) -> list[list[Any]]:
        return [keys for asked, keys in self.asked if asked == op]

    def _known(self, name: str) -> int:
        if name not in self.topics:
            raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
        return self.topics[name]

    def poll(self, _timeout: float) -> None:
        pass

    def list_topics(self, timeout: float) -> Any:
        self.asked.append(("metadata", []))
        return SimpleNamespace(brokers=dict.fromkeys(range(self.brokers)), topics=dict(self.topics))

    def create_topics(self, topics: list[Any], **_: Any) -> dict[Any, Future]:
        wanted = {one.topic: one for one in topics}

        def create(name: str) -> None:
            if name in self.topics:
                raise KafkaException(KafkaError(KafkaError.TOPIC_ALREADY_EXISTS))
            self.topics[name] = wanted[name].num_partitions
            self.replication[name] = wanted[name].replication_factor
            self.configs[name] = dict(wanted[name].config)

        return self.answer("create_topics", wanted, create)

    def create_partitions(self, topics: list[Any], **_: Any) -> dict[Any, Future]:
        counts = {one.topic: one.new_total_count for one in topics}

        def grow(name: str) -> None:
            if self._known(name) >= counts[name]:
                raise KafkaException(KafkaError(KafkaError.INVALID_PARTITIONS))
            self.topics[name] = counts[name]

        return self.answer("create_partitions", counts, grow)

    def delete_topics(self, names: list[str], **_: Any) -> dict[Any, Future]:
        return self.answer("delete_topics", names, lambda name: self._known(name) and self.topics.pop(name))

    def describe_topics(self, names: TopicCollection, **_: Any) -> dict[Any, Future]:
        def describe(name: str) -> Any:
            partitions = [SimpleNamespace(id=0, replicas=[1], isr=[1])] * self._known(name)
            return SimpleNamespace(partitions=partitions, topic_id=f"id of {name}")

        return self.answer("describe_topics", [*names.topic_names], describe)

    def describe_configs(self, resources: list[Any], **_: Any) -> dict[Any, Future]:
        entries = {"retention.ms": SimpleNamespace(value="7")}
        return self.answer("describe_configs", resources, lambda one: self._known(one.name) and entries)

    def incremental_alter_configs(self, resources: list[Any], **_: Any) -> dict[Any, Future]:
        return self.answer("configure", resources, lambda one: self._known(one.name) and None)

    def list_offsets(self, places: dict[Any, Any], **_: Any) -> dict[Any, Future]:
        return self.answer("list_offsets", places, self._at)

    def delete_records(self, places: list[Any], **_: Any) -> dict[Any, Future]:
        return self.answer("delete_records", places, self._at)

    def _at(self, place: TopicPartition) -> Any:
        self._known(place.topic)
        return SimpleNamespace(offset=place.partition + 10)

    def list_consumer_groups(self, **_: Any) -> Future:
        states = {"g": ConsumerGroupState.STABLE, "{h}": ConsumerGroupState.EMPTY}
        listed = SimpleNamespace(valid=[SimpleNamespace(group_id=g, state=s) for g, s in states.items()])
        return self.answer("list_groups", [None], lambda _: listed)[None]

    def list_consumer_group_offsets(self, request: list[Any], **_: Any) -> dict[Any, Future]:
        places = SimpleNamespace(topic_partitions=[TopicPartition("q", 1, 3), TopicPartition("x", 0)])
        return self.answer("offsets_of_records", [request[0].group_id], lambda _: places)

    def describe_consumer_groups(self, names: list[str], **_: Any) -> dict[Any, Future]:
        places = SimpleNamespace(topic_partitions=[TopicPartition("q", 1), TopicPartition("q", 0)])
        member = SimpleNamespace(client_id="c", assignment=places)
        return self.answer("describe_groups", names, lambda _: SimpleNamespace(members=[member]))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def admin() -> FakeAdmin:
    return FakeAdmin()


@pytest.fixture
def topics(admin, clock) -> Topics:
    made = Topics(KafkaConnection(bootstrap="127.0.0.1:1"), TIMEOUT_S, clock)
    made._admin = admin
    return made


def test_the_longest_transaction_is_unknown_while_answers_name_no_broker(topics, admin):
    """Kafka gives such answers for a moment after all brokers were away."""
    admin.brokers = 0
    assert topics.longest_transaction_ms() is None


@pytest.mark.parametrize(
    ("brokers", "replication", "in_sync"), [(1, 1, "1"), (2, 2, "1"), (3, 3, "2"), (5, 3, "2")]
)
def test_r8_with_three_replicas_two_must_have_what_is_acknowledged(
    brokers, replication, in_sync, topics, admin
):
    admin.brokers = brokers
    topics.create(QUEUE, 2)
    assert admin.topics == dict.fromkeys(NAMES, 2)
    assert admin.replication == dict.fromkeys(NAMES, replication)
    for config in admin.configs.values():
        assert config["min.insync.replicas"] == in_sync
        assert config["unclean.leader.election.enable"] == "false"
        assert config["cleanup.policy"] == "delete"
        assert (config["retention.ms"], config["retention.bytes"]) == (str(DEFAULT_RETENTION_MS), "-1")
    for name in NAMES[1::2]:
        assert admin.configs[name]["message.timestamp.type"] == "LogAppendTime"


@pytest.mark.parametrize("limit", ["max_lease_ms", "max_delay_ms"])
def test_r9_retention_must_be_longer_than_the_longest_hold_and_delay(limit, topics, admin):
    queue = QueueSettings(name="q", **{"max_lease_ms": 1_000, "max_delay_ms": 1_000, limit: 86_400_000})
    for retention_ms in (86_399_999, 86_400_000):
        with pytest.raises(ConfigError, match="retention"):
            topics.create(queue, retention_ms=retention_ms)
    assert admin.topics == {}
    topics.create(queue, retention_ms=86_400_001)
    assert admin.configs["q"]["retention.ms"] == "86400001"


def test_r19_markers_topics_grow_before_what_their_markers_are_of(topics, admin):
    """Otherwise a message in a new partition could be taken, and its start marker not be written."""
    topics.create(QUEUE, 1)
    topics.grow(QUEUE, 3)
    grown = [name for names in admin.of("create_partitions") for name in names]
    assert sorted(grown) == sorted(NAMES)
    name, markers, dead, dead_markers = map(grown.index, NAMES)
    assert markers < name
    assert dead_markers < dead
    topics.grow(QUEUE, 3)
    assert len(admin.of("create_partitions")) == 4


def test_r19_what_can_not_have_more_markers_partitions_gets_no_more_itself(topics, admin):
    topics.create(QUEUE, 1)
    admin.always = Fault("create_partitions", KafkaError.POLICY_VIOLATION, only=QUEUE.markers_topic)
    with pytest.raises(KmqError, match="q__markers"):
        topics.grow(QUEUE, 3)
    assert ["q"] not in admin.of("create_partitions")


MEMBERS = {"q": [GroupMember("g", "c")]}
CALLS: dict[str, tuple[Callable[[Topics], Any], Any]] = {
    "create_topics": (lambda topics: topics.create(QUEUE, 2).partitions, 2),
    "create_partitions": (lambda topics: topics.grow(QUEUE, 3).partitions, 3),
    "delete_topics": (lambda topics: topics.delete(topics_of(QUEUE)), None),
    "describe_topics": (lambda topics: set(topics.describe(NAMES)), set(NAMES)),
    "describe_configs": (
        lambda topics: topics.describe(["q"], with_config=True)["q"].config,
        {"retention.ms": "7"},
    ),
    "configure": (lambda topics: topics.configure("q", {"retention.ms": "7"}), None),
    "list_offsets": (lambda topics: topics.offsets("q", [0, 1]), {0: (10, 10), 1: (11, 11)}),
    "delete_records": (lambda topics: topics.delete_records("q", {0: 7, 1: 7}), None),
    "list_groups": (lambda topics: topics.groups(), ({"q": ["g", "{h}"]}, MEMBERS)),
    "offsets_of_records": (lambda topics: topics.groups()[0], {"q": ["g", "{h}"]}),
    "describe_groups": (lambda topics: topics.members(), MEMBERS),
}


def exist(admin: FakeAdmin, op: str) -> None:
    admin.topics = {} if op == "create_topics" else dict.fromkeys(NAMES, 2)


@pytest.mark.parametrize("op", CALLS)
def test_what_passes_by_itself_is_asked_for_again(op, topics, admin):
    exist(admin, op)
    call, wanted = CALLS[op]
    for code in (KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.NOT_CONTROLLER, KafkaError._TIMED_OUT):
        admin.faults.append(Fault(op, code))
    assert call(topics) == wanted
    assert not admin.faults
    assert ("metadata", []) in admin.asked  # librdkafka is made to look for leaders and the controller


@pytest.mark.parametrize("op", CALLS)
def test_a_try_that_was_carried_out_unseen_is_no_error(op, topics, admin):
    exist(admin, op)
    call, wanted = CALLS[op]
    admin.faults.append(Fault(op, KafkaError._TIMED_OUT, done=True))
    assert call(topics) == wanted
    left = {} if op == "delete_topics" else dict.fromkeys(NAMES, 3 if op == "create_partitions" else 2)
    assert admin.topics == left


@pytest.mark.parametrize("op", CALLS)
def test_what_does_not_pass_is_told_at_once(op, topics, admin, clock):
    exist(admin, op)
    admin.always = Fault(op, KafkaError.CLUSTER_AUTHORIZATION_FAILED)
    with pytest.raises(AccessDenied):
        CALLS[op][0](topics)
    assert not clock.slept
    assert len(admin.of(op)) == 1 + (op == "offsets_of_records")


@pytest.mark.parametrize("code", [KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError._TRANSPORT])
@pytest.mark.parametrize("op", CALLS)
def test_what_does_not_pass_in_time_is_unavailable(op, code, topics, admin, clock):
    exist(admin, op)
    admin.always = Fault(op, code)
    with pytest.raises(Unavailable, match=r"(topic|partitions|describe|offsets|records|groups).*127.0.0.1:1"):
        CALLS[op][0](topics)
    assert TIMEOUT_S <= clock.now < TIMEOUT_S + 1
    assert 6 < len(clock.slept) < 20  # pauses grow


def test_only_what_failed_is_asked_for_again(topics, admin):
    exist(admin, "")
    second = TopicPartition("q", 1)
    admin.faults.extend([Fault("delete_records", KafkaError.NOT_LEADER_FOR_PARTITION, only=second)] * 2)
    topics.delete_records("q", {0: 7, 1: 7})
    assert [[one.partition for one in keys] for keys in admin.of("delete_records")] == [[0, 1], [1], [1]]


@pytest.mark.parametrize("bad", [0, 1])
def test_of_several_errors_the_one_that_does_not_pass_is_told(bad, topics, admin, monkeypatch):
    exist(admin, "")

    def fail(place):
        code = KafkaError.OFFSET_OUT_OF_RANGE if place.partition == bad else KafkaError._TIMED_OUT
        raise KafkaException(KafkaError(code))

    monkeypatch.setattr(admin, "_at", fail)
    with pytest.raises(KmqError, match=r"delete records of q: .*range"):
        topics.delete_records("q", {0: 7, 1: 7})
    assert len(admin.of("delete_records")) == 1


def test_that_a_topic_is_unknown_passes_where_it_was_just_made(topics, admin, clock):
    with pytest.raises(TopicError):
        topics.offsets("q", [0])
    topics.create(QUEUE, 2)
    unknown = Fault("list_offsets", KafkaError.UNKNOWN_TOPIC_OR_PART)
    admin.faults.extend([unknown] * 3)
    assert topics.offsets("q", [1]) == {1: (11, 11)}
    clock.now += TIMEOUT_S
    admin.faults.append(unknown)
    with pytest.raises(TopicError):
        topics.offsets("q", [1])
    topics.grow(QUEUE, 3)
    admin.faults.append(unknown)
    assert topics.offsets("q", [2]) == {2: (12, 12)}
    topics.delete(topics_of(QUEUE))
    deleted_at = clock.now
    with pytest.raises(TopicError):
        topics.offsets("q", [1])
    assert clock.now == deleted_at


def test_partitions_that_are_refused_are_not_taken_for_made(topics, admin):
    exist(admin, "")
    admin.always = Fault("create_partitions", KafkaError.INVALID_PARTITIONS)
    with pytest.raises(Unavailable, match=r"add partitions to .* 3"):
        topics.grow(QUEUE, 3)


def test_create_believes_the_broker_that_knows_the_new_topics(topics, admin, monkeypatch):
    """Another one may not have been told yet: with three brokers that happened every other time."""
    describe = topics.describe
    monkeypatch.setattr(topics, "describe", lambda names: describe(names) if len(admin.asked) < 4 else {})
    assert topics.create(QUEUE).queue.name == "q"


def test_settings_of_a_topic_that_one_broker_does_not_know_yet(topics, admin):
    """It is described, so it exists or was just deleted; the next description says which."""
    exist(admin, "")
    admin.faults.extend([Fault("describe_configs", KafkaError.UNKNOWN_TOPIC_OR_PART)] * 2)
    assert topics.describe(["q"], with_config=True)["q"].config == {"retention.ms": "7"}
    admin.always = Fault("describe_configs", KafkaError.UNKNOWN_TOPIC_OR_PART)
    admin.topics = {}
    assert topics.describe(["q"], with_config=True) == {}


def test_tries_take_longer_and_longer_and_end_in_time(clock):
    found = []
    for try_s in kafka_errors.tries(60, clock):
        found.append(try_s)
        clock.now += try_s
    assert found[:4] == [2, 4, 8, 16]
    assert clock.now == pytest.approx(60)
    assert list(kafka_errors.tries(0, clock)) == [0.1]


def test_a_pause_is_no_longer_than_the_time_that_is_left(clock):
    started = clock.now
    assert len(list(kafka_errors.tries(0.03, clock))) >= 2
    assert math.isclose(clock.now - started, 0.03)


class Describer:
    """An administration client whose answers come when the test says so."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Future[Any]]] = []

    def poll(self, _timeout_s: float) -> int:
        return 0

    def describe_topics(self, topics: TopicCollection, request_timeout: float) -> dict[str, Future[Any]]:
        self.asked.append({name: Future() for name in topics.topic_names})
        return self.asked[-1]

    def answer(self, *ids: str | None) -> None:
        for future, one in zip(self.asked[-1].values(), ids, strict=True):
            if one is None:
                error = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
                future.set_exception(KafkaException(error))
            else:
                future.set_result(SimpleNamespace(topic_id=one))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Describer:
    describer = Describer()
    monkeypatch.setattr(librdkafka, "new_admin", lambda _: describer)
    return describer


def test_r24_ids_that_were_left_behind_do_not_come_back(watched: Describer) -> None:
    """A broker that was not told of the new topics yet tells the ids of the old ones."""
    clock = FakeClock()
    old, new = TopicIds("old", "old m"), TopicIds("new", "new m")
    watch = TopicWatch(KafkaConnection(), QUEUE, old, clock)
    for answer, expected in (
        (("old", "old m"), old),
        ((None, "old m"), old),  # being deleted
        (("new", "new m"), new),
        (("old", "old m"), new),
        (("new", "new m"), new),
    ):
        clock.now += 1.0
        watch.look()
        watched.answer(*answer)
        assert watch.look() == expected
    assert len(watched.asked) == 5


def test_r24_who_is_told_of_new_topics_first_and_then_of_the_old_ones_does_not_stay_with_these(
    watched: Describer,
) -> None:
    """Made just behind new topics, it can't know which ids are the old ones."""
    clock = FakeClock()
    old, new = TopicIds("old", "old m"), TopicIds("new", "new m")
    watch = TopicWatch(KafkaConnection(), QUEUE, new, clock)
    told = []
    for answer in (old, new, old, *[new] * 20):
        clock.now += 1.0
        watch.look()
        watched.answer(answer.queue, answer.markers)
        told.append(watch.look())
    assert told == [*[old] * 13, *[new] * 10]


def test_lanes_are_looked_for_now_and_then_and_seldom_where_this_client_may_not_see_them(
    watched: Describer,
) -> None:
    clock = FakeClock()
    ids = TopicIds("q", "q__markers")
    watch = TopicWatch(KafkaConnection(), QUEUE, ids, clock, ["lane", "secret"])

    def look(**refused: int) -> None:
        watch.look()
        for name, future in watched.asked[-1].items():
            if name in refused:
                future.set_exception(KafkaException(KafkaError(refused[name])))
            else:
                future.set_result(SimpleNamespace(topic_id=name))
        watch.look()

    for _ in range(11):
        clock.now += 1.0
        missing = {"lane": KafkaError.UNKNOWN_TOPIC_OR_PART} if clock.now < 6 else {}
        look(secret=KafkaError.TOPIC_AUTHORIZATION_FAILED, **missing)
        if clock.now == 4:
            assert watch.others_there is None
        if clock.now == 5:
            assert watch.others_there == frozenset()
    assert watch.others_there == {"lane"}
    clock.now = 306.0  # it has been allowed since: who adds a lane does that before
    look()
    assert watch.others_there == {"lane", "secret"}
    asked, usual = [sorted(one) for one in watched.asked if len(one) > 2], ["lane", "q", "q__markers"]
    assert asked == [[*usual, "secret"], usual, [*usual, "secret"]]


def test_r24_ids_are_asked_for_at_once_when_they_must_be_new(watched: Describer) -> None:
    clock = FakeClock()
    watch = TopicWatch(KafkaConnection(), QUEUE, TopicIds("id", "m"), clock)
    assert watch.knows_since(0.0)
    clock.now = 0.1
    assert not watch.knows_since(0.1)
    watch.look()
    watched.answer("id", None)
    watch.look()
    assert not watch.knows_since(0.1), "one of them is not there"
    clock.now = 0.2
    watch.look()
    watched.answer("id", "m")
    watch.look()
    assert watch.knows_since(0.1)
