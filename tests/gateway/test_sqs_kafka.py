"""SQS on Kafka, which keeps the visibility timeout of a queue and no other attribute."""

import uuid

import pytest
from botocore.exceptions import ClientError
from gateway_support import running
from sqs_support import client, code

from kmqpy.gateway.tracker_process import TrackerProcess
from kmqpy.queue import storage_for


def test_a_queue_on_kafka_has_a_visibility_timeout_and_refuses_other_attributes(cluster):
    root = f"/sqs_{uuid.uuid4().hex[:8]}"
    url = f"kafka://{cluster.bootstrap}?zookeeper={cluster.zookeeper}&root={root}"
    with TrackerProcess(url), running(storage_for(url), roots={"": root}) as served:
        sqs = client(served)
        given = {"VisibilityTimeout": "40", "DelaySeconds": "0", "MessageRetentionPeriod": "345600"}
        name = f"s-{uuid.uuid4().hex[:12]}"
        queue = sqs.create_queue(QueueName=name, Attributes=given)["QueueUrl"]
        for attributes in ({"DelaySeconds": "5"}, {"Policy": '{"Statement": {}}'}, {"FifoQueue": "true"}):
            new = f"{name}.fifo" if "FifoQueue" in attributes else f"{name}-2"
            with pytest.raises(ClientError) as error:
                sqs.create_queue(QueueName=new, Attributes=attributes)
            assert code(error) == "InvalidAttributeName"
        with pytest.raises(ClientError) as error:
            sqs.set_queue_attributes(QueueUrl=queue, Attributes={"DelaySeconds": "5"})
        assert code(error) == "InvalidAttributeName"
        with pytest.raises(ClientError) as error:
            sqs.tag_queue(QueueUrl=queue, Tags={"a": "b"})
        assert code(error) == "AWS.SimpleQueueService.UnsupportedOperation"
        sqs.set_queue_attributes(QueueUrl=queue, Attributes={"VisibilityTimeout": "50"})
        found = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["VisibilityTimeout"])["Attributes"]
        assert found == {"VisibilityTimeout": "50"}
        sqs.send_message(QueueUrl=queue, MessageBody="a")
        for _ in range(10):
            messages = sqs.receive_message(QueueUrl=queue, WaitTimeSeconds=5).get("Messages", [])
            if messages:
                break
        assert [one["Body"] for one in messages] == ["a"]
        sqs.delete_message(QueueUrl=queue, ReceiptHandle=messages[0]["ReceiptHandle"])
