"""What EmoDB's calls do, over every storage: claims, ids, purges, moves, dedup queues."""

import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from gateway_support import DEDUP, QUEUE, Calls, ids, payloads, running

from kmqpy.core.clock import wait_until
from kmqpy.kafka.settings import QueueSettings
from kmqpy.kafka.topics import Topics
from kmqpy.queue import storage_for


def becomes(value, wanted, seconds=20):
    """Storages with `immediate` need no wait; on Kafka a tracker redelivers a moment later."""
    found = []
    if not wait_until(lambda: found.append(value()) or found[-1] == wanted, seconds, every_s=0.05):
        assert found[-1] == wanted


def polled(calls, count, **options):
    """Poll until so many messages came."""
    found = []
    assert wait_until(
        lambda: found.extend(calls.poll(count - len(found), **options)) or len(found) >= count,
        20,
        every_s=0.02,
    ), found
    return found


def test_messages_are_sent_claimed_and_acknowledged(calls):
    assert (calls.size(), calls.claims(), calls.poll(), calls.peek()) == (0, 0, [], [])
    sent = ["text", 1, 2.5, None, True, {"b": 1, "a": [1, {}]}, [], "é\u2028", 10**30]
    calls.send(*sent)
    becomes(calls.size, 9)
    assert sorted(map(repr, payloads(calls.peek()))) == sorted(map(repr, sent))
    claimed = polled(calls, 4)
    assert all(message.keys() == {"id", "payload"} for message in claimed)
    becomes(calls.claims, 4)
    assert calls.size() == 9
    calls.ack(*ids(claimed))
    becomes(calls.size, 5)
    rest = polled(calls, 5)
    assert sorted(map(repr, payloads(claimed + rest))) == sorted(map(repr, sent))
    assert calls.poll() == []


def ids_stay_the_same_and_act_whoever_has_the_claim_also_after_its_end(calls):
    calls.send("a", "b")
    seen = {message["payload"]: message["id"] for message in calls.peek()}
    first = polled(calls, 2, ttl=1)
    assert {message["payload"]: message["id"] for message in first} == seen
    again = polled(calls, 2, ttl=60)  # when those claims have ended
    assert {message["payload"]: message["id"] for message in again} == seen
    calls.unclaim()
    third = polled(calls, 2, ttl=1)
    assert {message["payload"]: message["id"] for message in third} == seen
    assert {message["payload"]: message["id"] for message in calls.peek()} == seen
    time.sleep(1.2)  # their claims end
    calls.ack(seen["a"])
    assert payloads(polled(calls, 1, ttl=60)) == ["b"]
    becomes(lambda: (calls.poll(), calls.size()), ([], 1))


def renew_claims_anew_what_expired_and_what_was_only_peeked(calls):
    calls.send("a", "b")
    a, b = ids(calls.peek())
    calls.renew(a, ttl=60)
    assert calls.claims() == 1
    assert payloads(polled(calls, 1)) == ["b"]
    calls.renew(b, ttl=1)  # the later end counts
    time.sleep(1.2)
    assert calls.poll() == []
    calls.unclaim()
    assert sorted(ids(polled(calls, 2, ttl=1))) == sorted([a, b])
    time.sleep(1.2)
    calls.renew(a, b, ttl=60)
    assert calls.poll() == []
    if calls.served.storage.capabilities.immediate:  # a copy on Kafka may wait until that claim is over
        calls.renew(b, ttl=0)
        assert ids(calls.poll()) == [b]


def renew_with_ttl_0_gives_back_what_was_only_peeked(calls):
    calls.send("a")
    (a,) = ids(calls.peek())
    calls.renew(a, ttl=60)
    assert calls.poll() == []
    calls.renew(a, ttl=0)
    assert ids(polled(calls, 1)) == [a]
    assert calls.poll() == []


def renew_makes_a_claim_longer(calls):
    calls.send("a")
    (message,) = polled(calls, 1, ttl=2)
    calls.renew(message["id"], ttl=60)
    time.sleep(2.3)
    assert calls.poll() == []
    calls.renew(message["id"], ttl=0)
    assert ids(polled(calls, 1)) == [message["id"]]


def what_was_handed_out_never_collapses(dedup):
    dedup.send("M1")
    (first,) = polled(dedup, 1, ttl=1)
    dedup.send("M1")
    others = []
    becomes(lambda: others.extend({*ids(dedup.poll(ttl=1))} - {first["id"]}) or len(others), 1)
    time.sleep(1.2)
    again = ids(polled(dedup, 2, ttl=1))  # redelivered ones do not collapse, either
    assert {*again} == {first["id"], *others}
    time.sleep(1.2)
    dedup.ack(first["id"])
    assert ids(polled(dedup, 1)) == others
    becomes(lambda: (dedup.poll(), dedup.size()), ([], 1))


def what_was_redelivered_does_not_collapse_with_what_is_new(dedup):
    dedup.send("M1")
    polled(dedup, 1, ttl=1)
    dedup.send("M1")
    time.sleep(1.2)
    assert payloads(polled(dedup, 2)) == ["M1", "M1"]


ALWAYS = (
    ids_stay_the_same_and_act_whoever_has_the_claim_also_after_its_end,
    renew_makes_a_claim_longer,
    renew_claims_anew_what_expired_and_what_was_only_peeked,
    renew_with_ttl_0_gives_back_what_was_only_peeked,
)
OF_DEDUP_QUEUES = (
    what_was_handed_out_never_collapses,
    what_was_redelivered_does_not_collapse_with_what_is_new,
)


def test_claims_end_as_promised(served):
    """All at once, each with a queue of its own, since they mostly wait for the ends of claims."""
    capabilities = served.storage.capabilities
    chosen = [(one, QUEUE) for one in ALWAYS]
    chosen += [(one, DEDUP) for one in OF_DEDUP_QUEUES if capabilities.collapse]
    with ThreadPoolExecutor(len(chosen)) as threads:
        running = [
            threads.submit(one, Calls(served, f"c-{uuid.uuid4().hex[:12]}", base)) for one, base in chosen
        ]
        for one in running:
            one.result()


def test_what_was_only_peeked_is_acknowledged(calls):
    calls.send("a", "b")
    becomes(lambda: payloads(calls.peek()), ["a", "b"])
    first, _ = ids(calls.peek())
    calls.ack(first)
    becomes(lambda: payloads(calls.peek()), ["b"])
    assert payloads(polled(calls, 1)) == ["b"]
    assert calls.poll() == []
    becomes(calls.size, 1)


def test_a_queue_that_was_made_halfway_is_completed(calls):
    storage = calls.served.storage
    if storage.capabilities.immediate:
        pytest.skip("a queue is made in one step")
    settings = QueueSettings(name=calls.name)
    Topics(storage._connection).create(settings, 1, 1, 10**9)  # then ZooKeeper did not answer any more
    assert calls.name not in storage.list()
    calls.send("a")
    assert payloads(polled(calls, 1, ttl=1)) == ["a"]
    assert payloads(polled(calls, 1, ttl=1)) == ["a"]  # trackers know of the queue
    assert storage.open(calls.name).capabilities.receipts_by_id


def test_poll_with_ttl_0_hands_out_and_claims_nothing(calls):
    calls.send("a", "b")
    first = polled(calls, 2, ttl=0)
    becomes(calls.claims, 0)
    assert sorted(ids(polled(calls, 2, ttl=0))) == sorted(ids(first))
    calls.ack(*ids(polled(calls, 2, ttl=0)))
    # On Kafka a copy of what was acknowledged counts until a poll comes past it.
    becomes(lambda: (calls.poll(), calls.size()), ([], 0))


def test_purge_removes_messages_and_claims_and_old_ids_do_nothing(calls):
    calls.send("a", "b", "c")
    claimed = polled(calls, 2)
    calls.purge()
    becomes(calls.size, 0)
    calls.ack(*ids(claimed))
    calls.renew(*ids(claimed), ttl=60)
    becomes(calls.claims, 0)
    calls.send("d")
    assert payloads(polled(calls, 1)) == ["d"]


def test_ids_of_a_queue_that_was_deleted_do_nothing_to_the_next_of_its_name(served, calls):
    if not served.storage.capabilities.immediate:
        pytest.skip("on Kafka a topic that was recreated is a matter of tests/integration")
    calls.send("a")
    (old,) = ids(calls.poll())
    served.storage.delete(calls.name)
    calls.send("b")
    calls.ack(old)
    calls.renew(old, ttl=0)
    assert payloads(calls.poll()) == ["b"]


def test_unclaimed_messages_are_no_attempts(calls):
    """A queue of EmoDB has no limit of attempts, unless one was set."""
    calls.send("a")
    for _ in range(6):
        polled(calls, 1)
        calls.unclaim()
    assert payloads(polled(calls, 1)) == ["a"]


def test_a_queue_and_a_dedup_queue_of_one_name_are_two(calls, dedup):
    other = Calls(calls.served, dedup.name)
    dedup.send("a")
    assert other.size() == 0
    other.send("b")
    assert payloads(polled(dedup, 1)) == ["a"]
    assert payloads(polled(other, 1)) == ["b"]
    message_id = ids(other.peek())[0]
    answer = calls.served.ask("POST", f"{dedup.path}/ack", [message_id])
    assert (answer.status, answer.body) == (400, b"Invalid event ID checksum.")


def test_any_name_of_emodb_is_a_queue_of_its_own(served):
    def is_a_queue(name):
        unique = (uuid.uuid4().hex[:12] + name)[:255] if name != "__system" else "__" + uuid.uuid4().hex
        one, other = Calls(served, unique), Calls(served, unique[:-1] + "z")
        one.send("a")
        other.send("b")
        return payloads(polled(one, 1)) == ["a"] and payloads(polled(other, 1)) == ["b"]

    names = ["a:b@c", "-.", "__system", "x" * 255, "a..b", ":", "@"]
    with ThreadPoolExecutor(len(names)) as threads:
        assert all(threads.map(is_a_queue, names))


def test_sendbatch_to_many_queues_checks_everything_before_the_first_send(served, calls):
    good, other = calls.name, f"{calls.name}-2"
    answer = served.ask("POST", f"{QUEUE}/_sendbatch", {good: ["a"], other: ["b", "c"], f"{good}-3": []})
    assert (answer.status, answer.body) == (200, b'{"success":true}')
    becomes(calls.size, 1)
    becomes(Calls(served, other).size, 2)
    too_large = "x" * (1024 * 1024)
    for bad in ({good: ["d"], "BAD": ["e"]}, {good: ["d"], other: [too_large]}):
        assert served.ask("POST", f"{QUEUE}/_sendbatch", bad).status == 400
    assert calls.size() == 1


def status_of_move(served, reference, base=QUEUE):
    return served.ask("GET", f"{base}/_move/{reference}").json


def moved(served, origin, target, base=QUEUE):
    answer = served.ask("POST", f"{base}/_move?from={origin}&to={target}")
    assert answer.status == 200, answer
    reference = answer.json["id"]
    becomes(lambda: status_of_move(served, reference, base)["status"], "COMPLETE", 60)
    assert status_of_move(served, reference, base) == {"from": origin, "to": target, "status": "COMPLETE"}
    return reference


def test_a_move_takes_everything_claimed_messages_too(served, calls):
    target = Calls(served, f"{calls.name}-target")
    calls.send(*range(250))
    claimed = polled(calls, 20, ttl=600)
    becomes(calls.claims, 20)
    reference = moved(served, calls.name, target.name)
    becomes(calls.size, 0)
    becomes(target.size, 250)
    assert target.claims() == 0
    arrived = polled(target, 250, ttl=600)
    assert sorted(payloads(arrived)) == [*range(250)]
    assert not set(ids(arrived)) & set(ids(claimed))
    calls.ack(*ids(claimed))  # their claims are gone
    becomes(target.size, 250)
    answer = served.ask("GET", f"/dedupq/1/_move/{reference}")
    assert answer.status == 404
    assert answer.exception == "com.bazaarvoice.emodb.queue.api.UnknownMoveException"
    assert answer.json == {"id": reference}


def test_a_move_of_a_queue_that_does_not_exist_is_complete(served, calls):
    moved(served, calls.name, f"{calls.name}-target")


class TestDedup:
    """The table in emodb.md."""

    def test_what_waits_collapses_and_an_ack_ends_all_of_it(self, dedup):
        dedup.send("M1", "M1")
        becomes(lambda: payloads(dedup.peek()), ["M1", "M1"])
        becomes(dedup.size, 2)
        (one,) = polled(dedup, 1)
        dedup.ack(one["id"])
        becomes(lambda: (dedup.poll(), dedup.peek()), ([], []))
        becomes(dedup.size, 0)  # may be the last number, on a busy machine

    def test_it_collapses_across_polls(self, dedup):
        dedup.send("M1", "M2")
        assert payloads(polled(dedup, 1)) in (["M1"], ["M2"])  # of one partition or the other, on Kafka
        dedup.send("M1", "M2")
        assert sorted(payloads(polled(dedup, 2))) == ["M1", "M2"]
        becomes(lambda: (dedup.poll(), dedup.size()), ([], 3))

    def test_a_poll_with_ttl_0_is_a_handing_out(self, dedup):
        dedup.send("M1")
        assert payloads(polled(dedup, 1, ttl=0)) == ["M1"]
        dedup.send("M1")
        assert payloads(polled(dedup, 2)) == ["M1", "M1"]

    def test_equal_json_is_equal(self, dedup):
        for raw in (b'{"a":1,"b":[1.0]}', b' {"b" : [1.00], "\\u0061":1}', b'{"a":1,"b":[1]}'):
            dedup._good("POST", "/send", raw=raw)
        assert len(polled(dedup, 2)) == 2
        assert dedup.poll() == []

    def test_what_is_sent_when_an_equal_one_was_acknowledged_by_a_peek_comes(self, dedup):
        dedup.send("M1")
        becomes(lambda: payloads(dedup.peek()), ["M1"])
        (peeked,) = ids(dedup.peek())
        dedup.ack(peeked)
        dedup.send("M1")
        assert payloads(polled(dedup, 1)) == ["M1"]

    def test_moved_messages_collapse_with_those_that_wait_in_the_target(self, served, dedup):
        target = Calls(served, f"{dedup.name}-target", "/dedupq/1")
        dedup.send("M1", "M2")
        polled(dedup, 1, ttl=600)
        target.send("M1")
        moved(served, dedup.name, target.name, "/dedupq/1")
        assert sorted(payloads(polled(target, 2))) == ["M1", "M2"]
        assert target.poll() == []


def test_a_dedup_queue_where_the_storage_can_t_have_one(cluster):
    with running(storage_for(f"zookeeper://{cluster.zookeeper}/q-{uuid.uuid4().hex[:12]}")) as served:
        answer = served.ask("POST", "/dedupq/1/x/send", 1)
    assert answer.status == 501
    assert "collapse" in answer.json["message"]


def test_what_programs_of_kmqpy_send_is_handed_out_whatever_it_is(served, calls):
    calls.send(1)
    with served.storage.open(calls.name) as queue:
        queue.send_many([b"text", b"\xff\x00", b'{"a": 1}', b'{"a": 1', b"", b"[1]\n"])
    found = polled(calls, 7)
    shown = sorted(map(repr, payloads(found)))
    assert shown == sorted(map(repr, [1, "text", {"base64": "/wA="}, {"a": 1}, '{"a": 1', "", [1]]))
    calls.ack(*ids(found))
    becomes(calls.size, 0)
