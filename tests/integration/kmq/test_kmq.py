"""`kmq` on a real Kafka and ZooKeeper, from create to delete."""

import json

import pytest
from confluent_kafka.admin import NewTopic
from support import until

from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topic_names import topics_of
from kmqpy.kafka.topics import Topics


class TestFlow:
    def test_a_queue_with_lanes_is_one_queue(self, kmq, queue_name):
        kmq("queue", "create", queue_name, "--retry-lane", "--priorities", 2, "--late-acks")
        assert kmq("send", queue_name, "u", "--priority", 9, "--key", "k") == "priority1:0-0\n"
        sent = kmq("send", queue_name, "a", "--key", "k").strip()
        assert kmq("size", queue_name) == "2\n"
        rows = [line.split()[:2] for line in kmq("stats", queue_name).splitlines()]
        lanes = [f"{queue_name}__retry", f"{queue_name}__priority1", queue_name, "total"]
        assert rows[-4:] == [[name, count] for name, count in zip(lanes, "0112", strict=True)]
        urgent, usual = sorted(kmq.lines("receive", queue_name, "--max", 2), key=lambda one: one["body"])[
            ::-1
        ]
        assert (urgent["id"], usual["id"]) == ("priority1:0-0", sent)
        assert kmq("ack", urgent["receipt"]) == "1 acknowledged\n"
        found = kmq.json("trace", queue_name, "priority1:0-0")
        assert (found["queue"], found["state"]) == (queue_name, "acknowledged")
        assert kmq.json("trace", urgent["receipt"]) == found
        by_key = kmq.lines("trace", queue_name, "--key", "k", "--since", "1h", "-o", "json")
        assert [one["state"] for one in by_key] == ["acknowledged", "in flight"]

    def test_from_create_to_delete(self, kmq, queue_name):
        made = kmq.json("queue", "create", queue_name, "--partitions", 2, "--lease", "20s")
        assert (made["partitions"], made["lease_ms"]) == (2, 20_000)
        assert [one["name"] for one in kmq.json("queue", "list")] == [queue_name]
        assert queue_name in kmq("queue", "list")

        sent = kmq("send", queue_name, "--key", "k", "--header", "a=b=c", stdin="one\ntwo\n\nfour").split()
        assert len(sent) == 4
        taken = kmq.lines("receive", queue_name, "--max", 4, "--holder", "me")
        assert [one["body"] for one in taken] == ["one", "two", "", "four"]
        assert {one["key"] for one in taken} == {"k"}
        assert taken[0]["headers"] == {"a": "b=c"}
        assert {one["attempts"] for one in taken} == {1}
        assert abs(taken[0]["lease_until_ms"] - taken[0]["enqueued_ms"] - 20_000) < 15_000

        # By another process: by arguments, and by what receive printed on its standard input.
        first = kmq.process("ack", taken[0]["receipt"])
        assert first.communicate() == ("1 acknowledged\n", "")
        assert kmq("ack", stdin=json.dumps(taken[1]) + "\n") == "1 acknowledged\n"
        assert kmq.json("nack", taken[2]["receipt"], "--delay", "1h", "--reason", "later") == {
            "done": 1,
            "failed": 0,
        }
        kmq("extend", taken[3]["receipt"], "--lease", "2h")

        listed = kmq.json("in-flight", queue_name)
        assert [(one["state"], one["reason"]) for one in listed] == [("released", "later"), ("leased", None)]
        assert {one["holder"] for one in listed} == {"me"}
        assert listed[1]["receipt"] == taken[3]["receipt"]
        assert listed[1]["lease_until_ms"] - listed[1]["since_ms"] > 7_000_000
        assert "released" in kmq("in-flight", queue_name)
        counts = kmq.json("stats", queue_name)
        assert (counts["depth"], counts["in_flight"], counts["overdue"]) == (0, 2, 0)
        assert "total" in kmq("stats", queue_name)

        out, err = kmq.both("purge", queue_name, stdin="y\n")
        assert out.startswith(f"queue {queue_name}: 2 messages")
        assert err == "kmq: to be deleted: 0 messages waiting, 2 in flight\n"
        kmq("send", queue_name, "five", "--partition", 1)
        out, err = kmq.both("queue", "delete", queue_name, "--yes", "-o", "json")
        names = [f"{queue_name}{end}" for end in ("", "__markers", "__undelivered", "__undelivered__markers")]
        assert json.loads(out) == {"queue": queue_name, "deleted": True, "topics": names, "kept": []}
        shown = [line.removeprefix("kmq: to be deleted: topic ") for line in err.splitlines()]
        assert [line.split()[0] for line in shown] == names
        assert shown[0] == f"{queue_name} with about 1 record"
        assert kmq.json("queue", "list") == []
        assert "no such" in kmq.error("queue", "describe", queue_name)

    def test_receive_and_acknowledge_at_once(self, kmq, name):
        kmq("send", name, "a", "b", "c")
        assert [one["body"] for one in kmq.lines("receive", name, "--max", 2, "--ack")] == ["a", "b"]
        counts = kmq.json("stats", name)
        assert (counts["depth"], counts["in_flight"]) == (1, 0)

    def test_nothing_to_receive_is_no_output(self, kmq, name):
        out, err = kmq.both("receive", name, "--wait", "1s")
        assert out == ""
        assert err == "kmq: no message within 1s; no tracker runs, so nothing is redelivered: kmq tracker\n"
        assert (
            kmq.both("receive", name, "--wait", "1s", "--zookeeper", "")[1] == "kmq: no message within 1s\n"
        )

    @pytest.mark.parametrize("answer", ["n\n", "", "\n", "yep\n"])
    def test_nothing_is_deleted_unless_it_is_confirmed(self, kmq, name, answer):
        kmq("send", name, "x")
        for command in (["purge"], ["queue", "delete"], ["dlq", "purge"]):
            out, err = kmq.both(*command, name, stdin=answer, code=2)
            assert out == ""
            assert err.splitlines()[-1].endswith("use --yes")
            assert "kmq: to be deleted: " in err
        assert kmq.json("stats", name)["depth"] == 1

    def test_delete_takes_registered_queues_and_with_leftovers_what_is_of_none(self, kmq, name, environment):
        topics = Topics(KafkaConnection(bootstrap=environment["KMQ_BOOTSTRAP"]))
        foreign, left = f"{name}-foreign", f"{name}-left"
        topics._admin.create_topics([NewTopic(foreign, 1, 1)])[foreign].result()
        topics.create(QueueSettings(name=left))
        for topic in (foreign, left, f"{name}__undelivered", f"{name}__markers"):
            assert "is not registered" in kmq.error("queue", "delete", topic, "--yes")
        for topic in (foreign, name, f"{name}__undelivered"):
            kmq.error("queue", "delete", topic, "--leftovers", "--yes")
        _, err = kmq.both("queue", "delete", left, "--leftovers", stdin="n\n", code=2)
        assert [line.split()[5] for line in err.splitlines()[:-1]] == [*topics_of(QueueSettings(name=left))]
        assert "Delete 4 topics left over from a queue" in err

        def own_topics() -> set[str]:
            return {topic for topic in topics.names() if topic.startswith(name)}

        before = own_topics()
        kmq.both("queue", "delete", left, "--leftovers", "--yes")
        until(lambda: before - own_topics() == {*topics_of(QueueSettings(name=left))})
        kmq("send", name, "x")
        assert (
            "is not empty (1 waiting)" in kmq.both("queue", "delete", name, "--if-empty", "--yes", code=2)[1]
        )
        kmq.lines("receive", name, "--ack")
        kmq.both("queue", "delete", name, "--if-empty", "--yes")
        until(lambda: topics.names().isdisjoint(topics_of(QueueSettings(name=name))))

    def test_bytes_survive(self, kmq, name):
        kmq("send", name, stdin=b"\xff\xfe\nplain\n")
        found = kmq.lines("receive", name, "--max", 2)
        assert found[0]["body_base64"] == "//4="
        assert found[1]["body"] == "plain"

    def test_a_delay_and_a_partition_are_kept(self, kmq, queue_name):
        made = kmq.json("queue", "create", queue_name, "--partitions", 3, "--set", "retry_delays=1s")
        assert made["retry_delays"] == ["1s"]
        sent = kmq.json("send", queue_name, "x", "--delay", "1h", "--partition", 2)
        assert sent == {"id": "2-0", "partition": 2, "offset": 0}
        for _ in range(5):  # on a busy machine it takes a while to join the group
            assert kmq.both("receive", queue_name, "--wait", "3s")[0] == ""
            counts = kmq.json("stats", queue_name)
            if counts["delayed"]:
                break
        assert (counts["depth"], counts["delayed"], counts["in_flight"]) == (1, 1, 0)

    def test_kafka_alone_is_enough_for_messages(self, kmq, name):
        kmq("send", name, "x", "--zookeeper", "")
        (found,) = kmq.lines("receive", name, "--zookeeper", "")
        kmq("ack", found["receipt"], "--zookeeper", "")
        assert kmq.json("stats", name, "--zookeeper", "")["in_flight"] == 0

    def test_names_of_topics_come_from_the_registry_and_without_it_from_its_copy(self, kmq, queue_name):
        kmq("queue", "create", queue_name, "--markers-topic", f"{queue_name}-m", "--max-redeliveries", "none")
        kmq("send", queue_name, "x")
        (found,) = kmq.lines("receive", queue_name)
        kmq("ack", found["receipt"])
        settings = kmq.json("queue", "describe", queue_name)["settings"]
        assert (settings["markers_topic"], settings["max_redeliveries"]) == (f"{queue_name}-m", None)
        kmq("send", queue_name, "y", "--zookeeper", "")
        (found,) = kmq.lines("receive", queue_name, "--zookeeper", "")
        assert found["body"] == "y"

    def test_alter_changes_what_is_named(self, kmq, name):
        assert kmq.json("queue", "alter", name, "--max-redeliveries", "9")["max_redeliveries"] == 9
        altered = kmq.json("queue", "alter", name, "--partitions", 2, "--late-acks")
        assert altered["late_acks"] is True
        assert kmq.json("queue", "describe", name)["partitions"] == 2
        assert "fewer than the 2" in kmq.error("queue", "alter", name, "--partitions", 1)
        kmq("queue", "alter", name, "--set", "retry_delays=1000ms,1m", "--set", "retry_jitter=0.5")
        settings = kmq.json("queue", "describe", name)["settings"]
        assert (settings["retry_delays"], settings["retry_jitter"]) == (["1s", "1m"], 0.5)
        assert kmq.json("queue", "alter", name, "--set", "retry_delays=")["retry_delays"] == []
        assert "can't be changed" in kmq.error("queue", "alter", name, "--set", "partitions=9")

    def test_a_queue_that_collapses_hands_out_one_of_equals(self, kmq, queue_name):
        assert kmq.json("queue", "create", queue_name, "--collapse")["collapse"] is True
        kmq("queue", "create", queue_name)  # its name alone changes nothing
        assert kmq.json("queue", "describe", queue_name)["settings"]["collapse"] is True
        kmq("send", queue_name, '{"a": 1}', '{"a":1}', "x")
        assert [one["body"] for one in kmq.lines("receive", queue_name, "--max", 3)] == ['{"a": 1}', "x"]

    def test_of_the_issue_a_create_with_other_settings_prints_the_whole_alter(self, kmq, name):
        settings = (
            "--lease 7s --max-lease 2h --max-delay 1h --max-redeliveries none --markers jvm --late-acks"
        )
        create = ["queue", "create", name, *settings.split()]
        _, _, command = kmq.error(*create).partition("; change them with: kmq ")
        kmq(*command.split())
        kmq(*create)  # the settings are these now
        assert kmq.error("queue", "create", name, "--lease", "30s").endswith(" --no-late-acks\n")


class TestWithTracker:
    def test_redelivery_dead_letters_and_redrive(self, kmq, make_queue, queue_name):
        queue = make_queue(max_redeliveries=0)  # its root is that of the fixture `environment`
        queue.tracker()
        kmq("send", queue_name, "poison", "bad")
        taken = kmq.lines("receive", queue_name, "--max", 2, "--lease", "1m")
        kmq("nack", taken[0]["receipt"])
        kmq("dead-letter", taken[1]["receipt"], "--reason", "no such user")
        until(lambda: len(kmq.json("dlq", "list", queue_name)) == 2)
        listed = kmq.json("dlq", "list", queue_name)
        assert {one["attempts"] for one in listed} == {1}
        assert any("no such user" in one["reason"] for one in listed)
        assert "no such user" in kmq("dlq", "list", queue_name)
        peeked = kmq.lines("dlq", "peek", queue_name)
        assert {one["body"] for one in peeked} == {"poison", "bad"}
        assert kmq.json("stats", queue_name)["dead_letters"] == 2
        out, err = kmq.both("dlq", "redrive", queue_name, listed[0]["id"], "7-7", code=1)
        assert "1 dead letter sent back" in out
        assert "no dead letter 7-7" in err
        emptied, _ = kmq.both("dlq", "purge", queue_name, "--origin", "another", "--yes")
        assert emptied == "queue another: 0 dead letters deleted\n"
        assert kmq.both("dlq", "purge", queue_name, "--yes")[0].startswith(
            f"queue {queue_name}: 1 dead letter deleted"
        )
        assert kmq.json("stats", queue_name)["dead_letters"] == 0
        (again,) = kmq.lines("receive", queue_name)
        assert (again["body"], again["attempts"]) == (peeked[0]["body"], 1)
        kmq("ack", again["receipt"])
        assert kmq("doctor", queue_name).count("error") == 0


def test_peek_size_and_orphans_work_as_on_other_storages(kmq, name):
    kmq("send", name, "one", "two", "--partition", 0)
    assert kmq("size", name) == "2\n"
    assert [one["body"] for one in kmq.lines("peek", name)] == ["one", "two"]
    (taken,) = kmq.lines("receive", name, "--lease", "5m", "--wait", "30s")
    until(lambda: kmq.json("orphans", name, "--older-than", "0s"))
    (orphan,) = kmq.json("orphans", name, "--older-than", "0s")
    assert orphan["receipt"] == taken["receipt"]
    assert kmq("size", name) == "1\n"
