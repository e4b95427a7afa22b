"""SQS's actions by boto3, over several storages."""

import asyncio
import base64
import json
import math
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from types import SimpleNamespace

import pytest
from botocore.exceptions import ClientError
from gateway_support import running
from sqs_support import ACCOUNT, client, code

from kmqpy.core.clock import SYSTEM_CLOCK, wait_until
from kmqpy.errors import Unavailable
from kmqpy.gateway.dialects.sqs import message_actions
from kmqpy.gateway.dialects.sqs.attempts import Attempts
from kmqpy.gateway.dialects.sqs.attributes import read_sheet
from kmqpy.gateway.dialects.sqs.catalog import Catalog
from kmqpy.gateway.dialects.sqs.messages import parse_handle
from kmqpy.gateway.service import polls
from kmqpy.gateway.service.hub import Hub
from kmqpy.gateway.service.ids import _DIGEST_BYTES, WireIds
from kmqpy.gateway.service.polls import Polls
from kmqpy.gateway.service.served_queue import ServedQueue
from kmqpy.queue import storage_for

SERVICE = "AWS.SimpleQueueService"


@pytest.fixture(scope="module")
def sqs(sqs_served):
    return client(sqs_served)


@pytest.fixture
def queue(sqs, name):
    """The URL of a new queue."""
    return sqs.create_queue(QueueName=name)["QueueUrl"]


def received(sqs, queue, **options):
    return sqs.receive_message(QueueUrl=queue, **options).get("Messages", [])


def bodies(messages):
    return [one["Body"] for one in messages]


def counts(sqs, queue):
    """Messages that are ready, in flight, delayed."""
    names = [f"ApproximateNumberOfMessages{end}" for end in ("", "NotVisible", "Delayed")]
    found = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=names)["Attributes"]
    return tuple(int(found[one]) for one in names)


@contextmanager
def later(ms):
    """Actions on messages have a clock that is so far ahead."""
    clock = SimpleNamespace(wall_ms=lambda: SYSTEM_CLOCK.wall_ms() + ms, monotonic=SYSTEM_CLOCK.monotonic)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(message_actions, "SYSTEM_CLOCK", clock)
        yield


def test_a_message_is_sent_received_and_deleted(sqs, queue):
    attributes = {
        "some.text": {"DataType": "String", "StringValue": "é\r\n"},
        "some.number": {"DataType": "Number.int", "StringValue": "-12.5e3"},
        "kmq-bytes": {"DataType": "Binary", "BinaryValue": b"\0\xff"},
    }
    trace = {"AWSTraceHeader": {"DataType": "String", "StringValue": "Root=1-2"}}
    sent = sqs.send_message(
        QueueUrl=queue, MessageBody="{é}\t", MessageAttributes=attributes, MessageSystemAttributes=trace
    )
    assert counts(sqs, queue) == (1, 0, 0)
    (one,) = received(
        sqs, queue, MessageAttributeNames=["All"], MessageSystemAttributeNames=["All"], VisibilityTimeout=0
    )
    assert (one["Body"], one["MessageId"]) == ("{é}\t", sent["MessageId"])
    assert one["MD5OfMessageAttributes"] == sent["MD5OfMessageAttributes"]
    assert one["MessageAttributes"] == attributes
    found = one["Attributes"]
    assert (found["ApproximateReceiveCount"], found["AWSTraceHeader"], found["SenderId"]) == (
        "1",
        "Root=1-2",
        ACCOUNT,
    )
    (again,) = received(sqs, queue, MessageAttributeNames=["some.*"], AttributeNames=["SentTimestamp"])
    assert again["ReceiptHandle"] != one["ReceiptHandle"]
    assert again["MessageAttributes"].keys() == {"some.text", "some.number"}
    assert again["MD5OfMessageAttributes"] != one["MD5OfMessageAttributes"]
    assert again["Attributes"] == {"SentTimestamp": found["SentTimestamp"]}
    assert counts(sqs, queue) == (0, 1, 0)
    assert received(sqs, queue) == []
    sqs.delete_message(QueueUrl=queue, ReceiptHandle=one["ReceiptHandle"])  # the older handle
    sqs.delete_message(QueueUrl=queue, ReceiptHandle=again["ReceiptHandle"])
    assert counts(sqs, queue) == (0, 0, 0)
    with pytest.raises(ClientError) as error:
        sqs.change_message_visibility(
            QueueUrl=queue, ReceiptHandle=again["ReceiptHandle"], VisibilityTimeout=9
        )
    assert code(error) == "InvalidParameterValue"


def test_visibility_is_changed_from_now_and_0_gives_back(sqs, queue):
    sqs.send_message(QueueUrl=queue, MessageBody="a")
    (one,) = received(sqs, queue, VisibilityTimeout=30)
    handle = one["ReceiptHandle"]
    sqs.change_message_visibility(QueueUrl=queue, ReceiptHandle=handle, VisibilityTimeout=0)
    (again,) = received(sqs, queue, AttributeNames=["ApproximateReceiveCount"], VisibilityTimeout=30)
    assert again["Attributes"] == {"ApproximateReceiveCount": "2"}
    sqs.change_message_visibility(QueueUrl=queue, ReceiptHandle=again["ReceiptHandle"], VisibilityTimeout=1)
    assert bodies(received(sqs, queue, WaitTimeSeconds=5)) == ["a"]  # sooner than after 30 s
    with pytest.raises(ClientError) as error:
        sqs.change_message_visibility(QueueUrl=queue, ReceiptHandle=handle, VisibilityTimeout=43_200 + 1)
    assert code(error) == "InvalidParameterValue"
    sqs.change_message_visibility(QueueUrl=queue, ReceiptHandle=handle, VisibilityTimeout=0)  # the oldest
    assert bodies(received(sqs, queue, VisibilityTimeout=1)) == ["a"]
    sqs.change_message_visibility(QueueUrl=queue, ReceiptHandle=handle, VisibilityTimeout=30)
    assert received(sqs, queue, WaitTimeSeconds=2) == []


def test_what_is_given_back_is_not_taken_from_who_receives_it_at_once(sqs, queue, monkeypatch):
    sqs.send_message(QueueUrl=queue, MessageBody="a")
    (one,) = received(sqs, queue, VisibilityTimeout=30)
    change, found = ServedQueue.change, []

    async def changed(*arguments):
        is_changed = await change(*arguments)
        if not found:
            found.extend(await asyncio.to_thread(received, sqs, queue, VisibilityTimeout=30))
        return is_changed

    monkeypatch.setattr(ServedQueue, "change", changed)
    sqs.change_message_visibility(QueueUrl=queue, ReceiptHandle=one["ReceiptHandle"], VisibilityTimeout=0)
    assert bodies(found) == ["a"]
    assert received(sqs, queue) == []


def test_the_latest_handle_counts_at_a_gateway_that_has_an_older_one(tmp_path, name):
    url = f"sqlite:///{tmp_path / 'queues.db'}"
    with running(storage_for(url)) as one, running(storage_for(url)) as other:
        here, there = client(one), client(other)
        queue = here.create_queue(QueueName=name)["QueueUrl"]
        here.send_message(QueueUrl=queue, MessageBody="a")
        assert bodies(received(here, queue, VisibilityTimeout=0)) == ["a"]
        (message,) = received(there, queue, VisibilityTimeout=30)
        change = partial(here.change_message_visibility, QueueUrl=queue)
        change(ReceiptHandle=message["ReceiptHandle"], VisibilityTimeout=60)
        assert received(here, queue) == []
        change(ReceiptHandle=message["ReceiptHandle"], VisibilityTimeout=0)
        assert bodies(received(here, queue)) == ["a"]


def test_a_delay_of_a_message_beats_that_of_the_queue(sqs, name):
    queue = sqs.create_queue(QueueName=name, Attributes={"DelaySeconds": "900"})["QueueUrl"]
    sqs.send_message(QueueUrl=queue, MessageBody="late")
    sqs.send_message(QueueUrl=queue, MessageBody="soon", DelaySeconds=1)
    sqs.send_message(QueueUrl=queue, MessageBody="now", DelaySeconds=0)
    assert bodies(received(sqs, queue, MaxNumberOfMessages=10)) == ["now"]
    assert counts(sqs, queue) == (0, 1, 2)
    assert bodies(received(sqs, queue, MaxNumberOfMessages=10, WaitTimeSeconds=10)) == ["soon"]


def test_a_long_poll_wakes_at_once(sqs, sqs_served, name):
    attributes = {"ReceiveMessageWaitTimeSeconds": "20"}
    queue = sqs.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"]

    def send_both():
        time.sleep(0.3)
        sqs.send_message(QueueUrl=queue, MessageBody="by SQS")
        time.sleep(0.3)
        with sqs_served.storage.open(name) as other:
            other.send("by kmqpy", headers={"name": "value"})

    sender = threading.Thread(target=send_both)
    begun_s = time.monotonic()
    sender.start()
    assert bodies(received(sqs, queue)) == ["by SQS"]
    (other,) = received(sqs, queue, MessageAttributeNames=["All"])
    sender.join()
    assert other["MessageAttributes"] == {"name": {"DataType": "String", "StringValue": "value"}}
    assert time.monotonic() - begun_s < 10
    begun_s = time.monotonic()
    assert received(sqs, queue, WaitTimeSeconds=0) == []
    assert time.monotonic() - begun_s < 5


def test_entries_of_a_batch_fail_alone(sqs, queue):
    sent = sqs.send_message_batch(
        QueueUrl=queue,
        Entries=[
            {"Id": "a", "MessageBody": "1"},
            {"Id": "b", "MessageBody": "\x07"},
            {"Id": "c", "MessageBody": "3", "DelaySeconds": 901},
            {"Id": "d", "MessageBody": "4"},
        ],
    )
    assert [one["Id"] for one in sent["Successful"]] == ["a", "d"]
    assert {one["Id"]: one["Code"] for one in sent["Failed"]} == {
        "b": "InvalidMessageContents",
        "c": "InvalidParameterValue",
    }
    messages = received(sqs, queue, MaxNumberOfMessages=10)
    assert bodies(messages) == ["1", "4"]
    handles = [one["ReceiptHandle"] for one in messages]
    entries = [
        {"Id": f"e{n}", "ReceiptHandle": one} for n, one in enumerate([*handles, "bad", handles[0][:-8]])
    ]
    changed = sqs.change_message_visibility_batch(
        QueueUrl=queue, Entries=[{**one, "VisibilityTimeout": 60} for one in entries]
    )
    deleted = sqs.delete_message_batch(QueueUrl=queue, Entries=entries)
    for found in (changed, deleted):
        assert [one["Id"] for one in found["Successful"]] == ["e0", "e1"]
        assert {one["Code"] for one in found["Failed"]} == {"ReceiptHandleIsInvalid"}
    assert counts(sqs, queue) == (0, 0, 0)


def test_a_made_up_handle_in_a_batch_fails_alone(sqs, queue, name):
    """Its checksums are good, but no storage has a message of such an id."""
    for body in ("1", "2"):
        sqs.send_message(QueueUrl=queue, MessageBody=body)
    first, second = (one["ReceiptHandle"] for one in received(sqs, queue, MaxNumberOfMessages=2))
    true = parse_handle(first)
    ids = WireIds(name, None)
    ids._digest = bytes.fromhex(true.wire_id)[:_DIGEST_BYTES]
    made_up = true._replace(wire_id=ids.make("no message")).text()
    entries = [{"Id": f"e{n}", "ReceiptHandle": one} for n, one in enumerate([first, made_up, second])]
    deleted = sqs.delete_message_batch(QueueUrl=queue, Entries=entries)
    assert [one["Id"] for one in deleted["Successful"]] == ["e0", "e2"]
    assert [(one["Id"], one["Code"]) for one in deleted["Failed"]] == [("e1", "ReceiptHandleIsInvalid")]
    assert counts(sqs, queue) == (0, 0, 0)
    with pytest.raises(ClientError) as error:
        sqs.delete_message(QueueUrl=queue, ReceiptHandle=made_up)
    assert code(error) == "ReceiptHandleIsInvalid"


def test_dead_letters_go_to_a_queue_of_their_own(sqs, queue, name):
    dead = sqs.create_queue(QueueName=f"{name}-dead")["QueueUrl"]
    policy = json.dumps({"deadLetterTargetArn": arn(f"{name}-dead"), "maxReceiveCount": "2"})
    sqs.set_queue_attributes(QueueUrl=queue, Attributes={"RedrivePolicy": policy})
    assert sqs.list_dead_letter_source_queues(QueueUrl=dead)["queueUrls"] == [queue]
    id_ = sqs.send_message(QueueUrl=queue, MessageBody="poison", MessageGroupId="g")["MessageId"]
    sqs.send_message(QueueUrl=queue, MessageBody="good")
    for _ in range(2):
        assert bodies(received(sqs, queue, VisibilityTimeout=0)) == ["poison"]
    assert bodies(received(sqs, queue)) == ["good"]
    (one,) = received(sqs, dead, AttributeNames=["All"])
    assert one["MessageId"] == id_
    found = one["Attributes"]
    assert found["DeadLetterQueueSourceArn"] == arn(name)
    assert (found["ApproximateReceiveCount"], found["MessageGroupId"]) == ("3", "g")
    assert counts(sqs, queue) == (0, 1, 0)
    allow = json.dumps({"redrivePermission": "denyAll"})
    sqs.set_queue_attributes(QueueUrl=dead, Attributes={"RedriveAllowPolicy": allow})
    with pytest.raises(ClientError) as error:
        sqs.create_queue(QueueName=f"{name}-2", Attributes={"RedrivePolicy": policy})
    assert code(error) == "InvalidParameterValue"
    sqs.set_queue_attributes(QueueUrl=queue, Attributes={"RedrivePolicy": ""})
    assert sqs.list_dead_letter_source_queues(QueueUrl=dead)["queueUrls"] == []


def arn(name):
    return f"arn:aws:sqs:us-east-1:{ACCOUNT}:{name}"


def buried(sqs, queue, dead, count):
    """Let messages become dead letters of `queue` in `dead`; returns the ARNs of both."""
    arns = [arn(one.rpartition("/")[2]) for one in (queue, dead)]
    policy = json.dumps({"deadLetterTargetArn": arns[1], "maxReceiveCount": 1})
    sqs.set_queue_attributes(QueueUrl=queue, Attributes={"RedrivePolicy": policy})
    for n in range(count):
        sqs.send_message(QueueUrl=queue, MessageBody=str(n))
    for _ in range(2):
        received(sqs, queue, MaxNumberOfMessages=10, VisibilityTimeout=0)
    assert counts(sqs, dead)[0] == count
    return arns


def task(sqs, source):
    (found,) = sqs.list_message_move_tasks(SourceArn=source)["Results"]
    return found


def test_a_move_task_puts_dead_letters_back(sqs, queue, name):
    dead = sqs.create_queue(QueueName=f"{name}-dead")["QueueUrl"]
    _, source = buried(sqs, queue, dead, 5)
    handle = sqs.start_message_move_task(SourceArn=source)["TaskHandle"]
    assert wait_until(lambda: task(sqs, source)["Status"] == "COMPLETED", 20)
    assert task(sqs, source)["ApproximateNumberOfMessagesMoved"] == 5
    assert (counts(sqs, queue), counts(sqs, dead)) == ((5, 0, 0), (0, 0, 0))
    with pytest.raises(ClientError) as error:
        sqs.cancel_message_move_task(TaskHandle=handle)
    assert code(error) == f"{SERVICE}.UnsupportedOperation"
    sqs.send_message(QueueUrl=dead, MessageBody="of nowhere")
    sqs.start_message_move_task(SourceArn=source)
    assert wait_until(lambda: task(sqs, source)["Status"] == "FAILED", 20)
    assert task(sqs, source)["FailureReason"] == "CouldNotDetermineMessageSource"
    assert counts(sqs, dead) == (1, 0, 0)
    other = sqs.create_queue(QueueName=f"{name}-other")["QueueUrl"]
    sqs.start_message_move_task(SourceArn=source, DestinationArn=arn(f"{name}-other"))
    assert bodies(received(sqs, other, WaitTimeSeconds=20)) == ["of nowhere"]
    for wrong in (arn(f"{name}-none"), arn(f"{name}-other")):
        with pytest.raises(ClientError) as error:
            sqs.start_message_move_task(SourceArn=wrong)
        assert code(error) in {"ResourceNotFoundException", "InvalidParameterValue"}


def test_a_move_task_that_could_not_be_started_is_started_again(sqs, queue, name, monkeypatch):
    dead = sqs.create_queue(QueueName=f"{name}-dead")["QueueUrl"]
    _, source = buried(sqs, queue, dead, 2)
    for owner, step in ((Hub, "with_made"), (Catalog, "change")):  # as if the gateway were killed there
        with monkeypatch.context() as patch:
            patch.setattr(owner, step, failing)
            with pytest.raises(ClientError) as error:
                sqs.start_message_move_task(SourceArn=source)
            assert code(error) == "ServiceUnavailable"
    sqs.start_message_move_task(SourceArn=source)
    assert wait_until(lambda: task(sqs, source)["Status"] == "COMPLETED", 20)
    assert (counts(sqs, queue), counts(sqs, dead)) == ((2, 0, 0), (0, 0, 0))


@pytest.mark.parametrize("origin", [["1", 9e12, 1, "arn"], ["\ud800", 1, 1, ""], ["1", math.inf, 1, ""]])
def test_a_message_says_what_it_likes_of_its_origin(sqs, sqs_served, queue, name, origin):
    dead, other = (sqs.create_queue(QueueName=f"{name}-{end}")["QueueUrl"] for end in ("dead", "other"))
    _, source = buried(sqs, queue, dead, 0)
    origin = [*origin[:3], origin[3] and arn(f"{name}-other")]
    with sqs_served.storage.open(f"{name}-dead") as opened:
        opened.send(b"a", headers=[("sqs-moved", json.dumps(origin).encode())])
    sqs.start_message_move_task(SourceArn=source)
    assert wait_until(lambda: task(sqs, source)["Status"] == "FAILED", 20)
    assert bodies(received(sqs, dead, AttributeNames=["All"], WaitTimeSeconds=5)) == ["a"]
    assert counts(sqs, other) == counts(sqs, queue) == (0, 0, 0)


def test_a_queue_with_forged_notes_breaks_no_other(sqs, sqs_served, queue, name):
    dead = sqs.create_queue(QueueName=f"{name}-dead")["QueueUrl"]
    buried(sqs, queue, dead, 0)
    policy = json.dumps({"deadLetterTargetArn": "no arn", "maxReceiveCount": 1})
    notes = json.dumps({"sqs": {"attributes": {"RedrivePolicy": policy}}})
    sqs_served.storage.create(f"{name}-forged", notes=notes)
    assert sqs.list_dead_letter_source_queues(QueueUrl=dead)["queueUrls"] == [queue]


async def failing(*_, **__):
    raise Unavailable("no storage")


def test_a_move_task_is_cancelled_or_goes_on_at_another_gateway(tmp_path, name):
    url = f"sqlite:///{tmp_path / 'queues.db'}"
    with running(storage_for(url)) as one:
        sqs = client(one)
        queue, dead = (sqs.create_queue(QueueName=f"{name}{end}")["QueueUrl"] for end in ("", "-dead"))
        _, source = buried(sqs, queue, dead, 6)
        handle = sqs.start_message_move_task(SourceArn=source, MaxNumberOfMessagesPerSecond=1)["TaskHandle"]
        with pytest.raises(ClientError) as error:
            sqs.start_message_move_task(SourceArn=source)
        assert code(error) == "InvalidParameterValue"
        assert wait_until(lambda: task(sqs, source)["ApproximateNumberOfMessagesMoved"] > 0, 60)
        sqs.cancel_message_move_task(TaskHandle=handle)
        assert wait_until(lambda: task(sqs, source)["Status"] == "CANCELLED", 10)
        left = counts(sqs, dead)[0]
        assert 0 < left < 6
        sqs.start_message_move_task(SourceArn=source, MaxNumberOfMessagesPerSecond=1)
    with running(storage_for(url)) as other:
        sqs = client(other)
        assert wait_until(lambda: task(sqs, source)["Status"] == "COMPLETED", 20)
        assert (counts(sqs, queue)[0], counts(sqs, dead)) == (6, (0, 0, 0))


@pytest.fixture
def fifo(sqs, sqs_served, name):
    """The URL of a new FIFO queue."""
    if not sqs_served.storage.capabilities.groups:
        pytest.skip("the storage says that it can't: groups")
    return sqs.create_queue(QueueName=f"{name}.fifo", Attributes={"FifoQueue": "true"})["QueueUrl"]


def sent(sqs, queue, body, group, dedup=None, **options):
    return sqs.send_message(
        QueueUrl=queue,
        MessageBody=body,
        MessageGroupId=group,
        MessageDeduplicationId=dedup or uuid.uuid4().hex,
        **options,
    )


def test_a_fifo_queue_hands_out_each_group_in_order(sqs, fifo):
    numbers = [sent(sqs, fifo, f"{group}{n}", group)["SequenceNumber"] for n in (1, 2, 3) for group in "ab"]
    assert numbers == sorted(numbers)
    assert {len(one) for one in numbers} == {20}
    first = received(sqs, fifo, MaxNumberOfMessages=4, MessageSystemAttributeNames=["All"])
    assert bodies(first) == ["a1", "a2", "a3", "b1"]
    assert first[0]["Attributes"]["SequenceNumber"] == numbers[0]
    assert first[3]["Attributes"]["MessageGroupId"] == "b"
    assert received(sqs, fifo, MaxNumberOfMessages=10) == []  # both groups are in flight
    sqs.change_message_visibility(QueueUrl=fifo, ReceiptHandle=first[3]["ReceiptHandle"], VisibilityTimeout=0)
    again = received(sqs, fifo, MaxNumberOfMessages=10)
    assert bodies(again) == ["b1", "b2", "b3"]
    for late in (sqs.delete_message, partial(sqs.change_message_visibility, VisibilityTimeout=9)):
        with pytest.raises(ClientError) as error:
            late(QueueUrl=fifo, ReceiptHandle=first[3]["ReceiptHandle"])  # it has ended
        assert code(error) == "InvalidParameterValue"
    sent(sqs, fifo, "a4", "a")
    for one in (*first[:3], again[0]):
        sqs.delete_message(QueueUrl=fifo, ReceiptHandle=one["ReceiptHandle"])
        sqs.delete_message(QueueUrl=fifo, ReceiptHandle=one["ReceiptHandle"])
    assert bodies(received(sqs, fifo, MaxNumberOfMessages=10)) == ["a4"]


def test_a_long_poll_hears_that_a_group_goes_on(sqs, fifo, monkeypatch):
    monkeypatch.setattr(polls, "_LOOK_EVERY_S", 60)
    is_waiting, wait = threading.Event(), Polls.wait

    def noted(*arguments):
        is_waiting.set()
        return wait(*arguments)

    monkeypatch.setattr(Polls, "wait", noted)
    sent(sqs, fifo, "a1", "a")
    sent(sqs, fifo, "a2", "a")
    (first,) = received(sqs, fifo)
    with ThreadPoolExecutor(1) as thread:
        polling = thread.submit(received, sqs, fifo, WaitTimeSeconds=20)
        assert is_waiting.wait(10)
        sqs.delete_message(QueueUrl=fifo, ReceiptHandle=first["ReceiptHandle"])
        assert bodies(polling.result(10)) == ["a2"]


def test_a_fifo_queue_knows_duplicates_also_after_they_were_deleted(sqs, sqs_served, fifo, name):
    one = sent(sqs, fifo, "1", "a", "same")
    (message,) = received(sqs, fifo)
    sqs.delete_message(QueueUrl=fifo, ReceiptHandle=message["ReceiptHandle"])
    other = sent(sqs, fifo, "2", "b", "same")
    assert (other["MessageId"], other["SequenceNumber"]) == (one["MessageId"], one["SequenceNumber"])
    assert counts(sqs, fifo) == (0, 0, 0)
    assert sqs_served.storage.describe(f"{name}.fifo").settings["dedup_window_ms"] == 5 * 60_000
    with pytest.raises(ClientError) as error:
        sqs.send_message(QueueUrl=fifo, MessageBody="3", MessageGroupId="a")
    assert code(error) == "InvalidParameterValue"
    with pytest.raises(ClientError) as error:
        sqs.send_message(QueueUrl=fifo, MessageBody="3", MessageDeduplicationId="a")
    assert code(error) == "MissingParameter"
    good = {"Id": "a", "MessageBody": "3", "MessageGroupId": "a", "MessageDeduplicationId": "3"}
    with pytest.raises(ClientError) as error:
        sqs.send_message_batch(QueueUrl=fifo, Entries=[good, {"Id": "b", "MessageBody": "4"}])
    assert code(error) == "InvalidParameterValue"
    assert counts(sqs, fifo) == (0, 0, 0)
    with pytest.raises(ClientError) as error:
        sent(sqs, fifo, "3", "a", DelaySeconds=1)
    assert code(error) == "InvalidParameterValue"
    attributes = {
        "FifoQueue": "True",
        "ContentBasedDeduplication": "True",
        "DeduplicationScope": "messageGroup",
    }
    scoped = sqs.create_queue(QueueName=f"{name}-2.fifo", Attributes=attributes)["QueueUrl"]
    for body, group in (("x", "a"), ("x", "a"), ("x", "b"), ("y", "a")):
        sqs.send_message(QueueUrl=scoped, MessageBody=body, MessageGroupId=group)
    assert bodies(received(sqs, scoped, MaxNumberOfMessages=10)) == ["x", "y", "x"]
    sqs.purge_queue(QueueUrl=scoped)  # also what was sent
    sqs.send_message(QueueUrl=scoped, MessageBody="x", MessageGroupId="a")
    sqs.set_queue_attributes(QueueUrl=scoped, Attributes={"DeduplicationScope": "queue"})
    for body, group in (("x", "b"), ("y", "a"), ("y", "b")):  # a minute later, it counts
        sqs.send_message(QueueUrl=scoped, MessageBody=body, MessageGroupId=group)
    assert bodies(received(sqs, scoped, MaxNumberOfMessages=10)) == ["x", "y", "x", "y"]
    with later(61_000):
        for body, group in (("z", "a"), ("z", "b")):
            sqs.send_message(QueueUrl=scoped, MessageBody=body, MessageGroupId=group)
    assert counts(sqs, scoped) == (1, 4, 0)
    sqs.purge_queue(QueueUrl=fifo)
    assert sent(sqs, fifo, "5", "a", "same")["MessageId"] != one["MessageId"]


def test_a_receive_is_repeated_by_its_attempt_id_unless_a_message_was_changed(sqs, fifo):
    for n in range(3):
        sent(sqs, fifo, str(n), "a")
    ask = partial(received, sqs, fifo, ReceiveRequestAttemptId="try", VisibilityTimeout=30)
    first = ask(MaxNumberOfMessages=2)
    assert bodies(first) == ["0", "1"]
    assert ask(MaxNumberOfMessages=2) == first  # the handles, too
    assert received(sqs, fifo, ReceiveRequestAttemptId="other") == []
    sqs.delete_message(QueueUrl=fifo, ReceiptHandle=first[0]["ReceiptHandle"])
    with pytest.raises(ClientError) as error:
        ask()
    assert code(error) == "InvalidParameterValue"
    sqs.delete_message(QueueUrl=fifo, ReceiptHandle=first[1]["ReceiptHandle"])
    second = received(sqs, fifo, ReceiveRequestAttemptId="second", VisibilityTimeout=1)
    time.sleep(1.1)  # its time is over: this is another receive
    third = received(sqs, fifo, ReceiveRequestAttemptId="second")
    assert (bodies(third), third[0]["ReceiptHandle"] == second[0]["ReceiptHandle"]) == (["2"], False)


def test_a_change_ends_the_latest_attempt_though_an_earlier_one_is_forgotten():
    attempts = Attempts()
    for name in ("one", "two"):
        attempts.keep(("queue", name), [{"Body": "a"}], ["message"], 1, 0.0)
    attempts.forget(("queue", "one"))
    attempts.touch("message")
    assert attempts.find(("queue", "two"), 0.0).shown == ()


def test_an_answer_that_is_larger_than_all_that_may_be_remembered_is_not():
    attempts = Attempts()
    attempts.keep(("queue", "one"), [{"Body": "a"}], ["message"], 64 * 1024 * 1024, 0.0)
    assert attempts.find(("queue", "one"), 0.0) is None


def test_notes_that_others_wrote_are_no_sheet():
    for until in ("Infinity", '"a"', "null"):
        notes = f'{{"sqs":{{"attributes":{{"DelaySeconds":"5"}},"scoped":["queue",{until}]}}}}'
        assert read_sheet(notes, 30_000).attributes == {}


@pytest.mark.parametrize("kind", ["standard", "fifo"])
def test_a_queue_with_too_many_in_flight_hands_out_no_more(sqs, sqs_served, kind, request):
    queue = request.getfixturevalue("queue" if kind == "standard" else "fifo")
    for n in range(4):
        sent(sqs, queue, str(n), "g") if kind == "fifo" else sqs.send_message(QueueUrl=queue, MessageBody="m")
    room = sqs_served.gateway._sqs._actions["ReceiveMessage"][1].__self__._room
    room.most, most = 3, room.most
    try:
        messages = received(sqs, queue, MaxNumberOfMessages=10)
        assert len(messages) == 3
        if kind == "fifo":
            assert received(sqs, queue) == []
        else:
            with pytest.raises(ClientError) as error:
                received(sqs, queue)
            assert (code(error), error.value.response["ResponseMetadata"]["HTTPStatusCode"]) == (
                "OverLimit",
                403,
            )
        for one in messages:
            sqs.delete_message(QueueUrl=queue, ReceiptHandle=one["ReceiptHandle"])
        assert wait_until(lambda: counts(sqs, queue) == (1, 0, 0), 5)
        time.sleep(1.1)  # for so long it is full without another count
        assert len(received(sqs, queue)) == 1
    finally:
        room.most = most


def test_messages_end_with_their_retention(sqs, queue, name):
    sqs.send_message(QueueUrl=queue, MessageBody="old")
    sqs.set_queue_attributes(QueueUrl=queue, Attributes={"MessageRetentionPeriod": "60"})
    with later(61_000):
        sqs.send_message(QueueUrl=queue, MessageBody="new")
        assert received(sqs, queue) == []  # by that clock both are old
        assert counts(sqs, queue) == (0, 0, 0)


def test_the_retention_of_dead_letters_begins_anew_in_a_fifo_queue_only(sqs, queue, fifo, name):
    for source, end, passed_s in ((queue, "", 0), (fifo, ".fifo", 9)):
        is_fifo = {"FifoQueue": "true"} if end else {}
        dead = sqs.create_queue(QueueName=f"{name}-dead{end}", Attributes=is_fifo)["QueueUrl"]
        policy = json.dumps({"deadLetterTargetArn": arn(f"{name}-dead{end}"), "maxReceiveCount": 1})
        sqs.set_queue_attributes(QueueUrl=source, Attributes={"RedrivePolicy": policy})
        ids = {"MessageGroupId": "g", "MessageDeduplicationId": "1"} if end else {}
        sqs.send_message(QueueUrl=source, MessageBody="poison", **ids)
        (one,) = received(sqs, source, AttributeNames=["SentTimestamp"], VisibilityTimeout=0)
        with later(9_000):
            assert received(sqs, source) == []
        (letter,) = received(sqs, dead, AttributeNames=["SentTimestamp"])
        sent_ms, dead_ms = (int(found["Attributes"]["SentTimestamp"]) for found in (one, letter))
        assert sent_ms + passed_s * 1000 <= dead_ms < sent_ms + passed_s * 1000 + 5_000


def test_dead_letters_of_fifo_queues_go_round_and_none_is_taken_for_a_duplicate(sqs, fifo, name):
    dead = sqs.create_queue(QueueName=f"{name}-dead.fifo", Attributes={"FifoQueue": "true"})["QueueUrl"]
    for source, target in ((fifo, f"{name}-dead.fifo"), (dead, f"{name}.fifo")):
        policy = json.dumps({"deadLetterTargetArn": arn(target), "maxReceiveCount": 1})
        sqs.set_queue_attributes(QueueUrl=source, Attributes={"RedrivePolicy": policy})
    id_ = sent(sqs, fifo, "poison", "g")["MessageId"]
    sent(sqs, dead, "no letter", "h", dedup=id_)
    assert bodies(received(sqs, dead, VisibilityTimeout=30)) == ["no letter"]
    for source in (fifo, dead, fifo, dead):
        assert bodies(received(sqs, source, VisibilityTimeout=0)) == ["poison"]
        assert received(sqs, source) == []


def test_a_task_of_celery_waits_for_its_eta(sqs, queue):
    for eta in (datetime.now(UTC) + timedelta(seconds=30), None):
        task = {"body": "W10=", "headers": {"id": "1", "eta": eta and eta.isoformat()}}
        sqs.send_message(QueueUrl=queue, MessageBody=base64.b64encode(json.dumps(task).encode()).decode())
    assert counts(sqs, queue) == (1, 0, 1)


def test_in_a_fair_queue_the_quiet_tenant_comes_first(sqs, name):
    noisy = [{"Id": f"{n}", "MessageBody": f"n{n}", "MessageGroupId": "noisy"} for n in range(10)]
    shown = []
    for url in (sqs.create_queue(QueueName=one)["QueueUrl"] for one in (f"fair-{name}", name)):
        for _ in range(4):
            sqs.send_message_batch(QueueUrl=url, Entries=noisy)
        for _ in range(3):
            assert len(received(sqs, url, MaxNumberOfMessages=10)) == 10
        sqs.send_message(QueueUrl=url, MessageBody="quiet", MessageGroupId="quiet")
        sqs.send_message(QueueUrl=url, MessageBody="alone")
        (first,) = received(sqs, url, MessageSystemAttributeNames=["All"])
        shown.append((first["Body"], first["Attributes"]["MessageGroupId"]))
        assert len(received(sqs, url, MaxNumberOfMessages=10)) == 10
    assert shown == [("quiet", "quiet"), ("n0", "noisy")]


def test_a_queue_lives_with_its_attributes(sqs, name):
    attributes = {"VisibilityTimeout": "0", "DelaySeconds": "5"}
    tags = {"team": "é", "empty": ""}
    queue = sqs.create_queue(QueueName=name, Attributes=attributes, tags=tags)["QueueUrl"]
    assert sqs.create_queue(QueueName=name, Attributes={"DelaySeconds": "5"})["QueueUrl"] == queue
    with pytest.raises(sqs.exceptions.QueueNameExists) as error:
        sqs.create_queue(QueueName=name, Attributes={"DelaySeconds": "6"})
    assert code(error) == "QueueAlreadyExists"
    assert sqs.get_queue_url(QueueName=name)["QueueUrl"] == queue
    assert sqs.list_queues(QueueNamePrefix=name)["QueueUrls"] == [queue]
    found = sqs.get_queue_attributes(QueueUrl=name, AttributeNames=["All"])["Attributes"]
    assert found.items() >= {**attributes, "MaximumMessageSize": "1048576", "QueueArn": arn(name)}.items()
    assert int(found["CreatedTimestamp"]) <= time.time()
    sqs.set_queue_attributes(QueueUrl=queue, Attributes={"VisibilityTimeout": "7"})
    sqs.tag_queue(QueueUrl=queue, Tags={"team": "b"})
    sqs.untag_queue(QueueUrl=queue, TagKeys=["empty", "none"])
    assert sqs.list_queue_tags(QueueUrl=queue)["Tags"] == {"team": "b"}
    found = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["VisibilityTimeout", "DelaySeconds"])
    assert found["Attributes"] == {"VisibilityTimeout": "7", "DelaySeconds": "5"}
    sqs.delete_queue(QueueUrl=queue)
    with pytest.raises(sqs.exceptions.QueueDoesNotExist) as error:
        sqs.send_message(QueueUrl=queue, MessageBody="a")
    assert code(error) == f"{SERVICE}.NonExistentQueue"
    with pytest.raises(ClientError) as error:
        sqs.create_queue(QueueName=name)
    assert code(error) == f"{SERVICE}.QueueDeletedRecently"


def test_permissions_edit_the_policy(sqs, queue, name):
    sqs.add_permission(QueueUrl=queue, Label="a", AWSAccountIds=["1", "2"], Actions=["SendMessage"])
    sqs.add_permission(QueueUrl=queue, Label="b", AWSAccountIds=["1"], Actions=["*"])
    with pytest.raises(ClientError):
        sqs.add_permission(QueueUrl=queue, Label="b", AWSAccountIds=["1"], Actions=["*"])
    sqs.remove_permission(QueueUrl=queue, Label="b")
    found = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["Policy"])["Attributes"]["Policy"]
    policy = json.loads(found)
    (statement,) = policy["Statement"]
    assert (policy["Version"], policy["Id"]) == ("2008-10-17", f"{arn(name)}/SQSDefaultPolicy")
    assert (statement["Sid"], statement["Action"], statement["Resource"]) == (
        "a",
        "SQS:SendMessage",
        arn(name),
    )
    sqs.remove_permission(QueueUrl=queue, Label="a")
    assert "Attributes" not in sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["Policy"])


def test_a_policy_has_at_most_8192_bytes(sqs, queue):
    def put(characters):
        policy = json.dumps({"Statement": {}, "Id": characters}, ensure_ascii=False)
        sqs.set_queue_attributes(QueueUrl=queue, Attributes={"Policy": policy})

    room = 8_192 - len('{"Statement": {}, "Id": ""}')
    put("a" * room)
    with pytest.raises(ClientError) as error:
        put("é" * (room // 2 + 1))
    assert code(error) == "InvalidAttributeValue"


def test_queues_are_listed_in_pages(sqs, name):
    urls = [sqs.create_queue(QueueName=f"{name}-{n}")["QueueUrl"] for n in range(3)]
    first = sqs.list_queues(QueueNamePrefix=name, MaxResults=2)
    assert first["QueueUrls"] == urls[:2]
    rest = sqs.list_queues(QueueNamePrefix=name, MaxResults=2, NextToken=first["NextToken"])
    assert (rest["QueueUrls"], rest.get("NextToken")) == (urls[2:], None)
    assert "QueueUrls" not in sqs.list_queues(QueueNamePrefix=f"{name}-none")


def test_other_gateways_see_what_one_changes(tmp_path, name):
    url = f"sqlite:///{tmp_path / 'queues.db'}"
    with running(storage_for(url)) as one, running(storage_for(url)) as other:
        here, there = client(one), client(other)
        queue = here.create_queue(QueueName=name, Attributes={"DelaySeconds": "9"})["QueueUrl"]
        there.send_message(QueueUrl=queue, MessageBody="a")
        assert counts(here, queue) == (0, 0, 1)
        here.set_queue_attributes(QueueUrl=queue, Attributes={"DelaySeconds": "0"})
        assert wait_until(
            lambda: there.send_message(QueueUrl=queue, MessageBody="b") and counts(here, queue)[0] > 0, 10
        )
        assert bodies(received(there, queue, WaitTimeSeconds=20)) == ["b"]
        here.purge_queue(QueueUrl=queue)
        with pytest.raises(ClientError) as error:
            there.purge_queue(QueueUrl=queue)
        assert code(error) == f"{SERVICE}.PurgeQueueInProgress"
        there.delete_queue(QueueUrl=queue)
        with pytest.raises(ClientError):
            here.get_queue_attributes(QueueUrl=queue, AttributeNames=["All"])
        with pytest.raises(ClientError) as error:
            here.create_queue(QueueName=name)
        assert code(error) == f"{SERVICE}.QueueDeletedRecently"
    with running(storage_for(url)) as third:
        sqs = client(third)
        assert "QueueUrls" not in sqs.list_queues()
        with pytest.raises(ClientError):
            sqs.create_queue(QueueName=name)
        third.storage.alter(
            "KMQ.sqs", notes=json.dumps({name: int(time.time() * 1000) - 61_000, "a": {}, "b": "c"})
        )
        sqs.create_queue(QueueName=name)
        third.storage.alter("KMQ.sqs", notes="[5")
        sqs.delete_queue(QueueUrl=queue)
        with pytest.raises(ClientError):
            sqs.create_queue(QueueName=name)
