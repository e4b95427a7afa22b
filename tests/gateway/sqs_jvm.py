"""Runs one of AWS's SDKs for Java, in a process of its own; prints what it got, as JSON.

    python tests/gateway/sqs_jvm.py 2 http://localhost:8080   (or 1)

SDK 2 speaks JSON; of SDK 1, 1.12.580 is among the last versions that speak the query protocol. Both check
MD5s, and throw if one is wrong. The jars are pinned in jars.json beside this file; to pin them anew:
relock(["aws-sdk-1", "aws-sdk-2"], Path("tests/gateway/jars.json")) of kmqpy.dev.jars.
"""

import json
import sys
from pathlib import Path

import jpype

from kmqpy.dev.jars import jar_set
from kmqpy.dev.java import find_java

LOCK = Path(__file__).with_name("jars.json")
REGION = "us-east-1"
BINARY = b"\x00\xff\n"


def start_jvm(sdk):
    home = find_java().resolve().parent.parent
    library = next(path for path in home.rglob("*jvm.*") if path.suffix in {".so", ".dylib", ".dll"})
    jars = [str(jar) for jar in jar_set(f"aws-sdk-{sdk}", LOCK)]
    jpype.startJVM(str(library), "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx256m", classpath=jars)


def listed(values):
    return jpype.JClass("java.util.ArrayList")(values)


def mapped(values):
    return jpype.JClass("java.util.HashMap")(values)


def texts(java_map):
    return {str(key): str(value) for key, value in java_map.items()}


def buffer():
    return jpype.JClass("java.nio.ByteBuffer").wrap(jpype.JArray(jpype.JByte)(BINARY))


class Sdk2:
    def __init__(self, endpoint):
        aws = "software.amazon.awssdk"
        self._model = f"{aws}.services.sqs.model"
        credentials = jpype.JClass(f"{aws}.auth.credentials.AwsBasicCredentials").create("x", "y")
        provider = jpype.JClass(f"{aws}.auth.credentials.StaticCredentialsProvider").create(credentials)
        self._client = (
            jpype.JClass(f"{aws}.services.sqs.SqsClient")
            .builder()
            .endpointOverride(jpype.JClass("java.net.URI").create(endpoint))
            .region(jpype.JClass(f"{aws}.regions.Region").of(REGION))
            .credentialsProvider(jpype.JClass(f"{aws}.identity.spi.IdentityProvider") @ provider)
            .build()
        )
        self._core = jpype.JClass("software.amazon.awssdk.core.SdkBytes")

    def _new(self, name):
        return jpype.JClass(f"{self._model}.{name}").builder()

    def create(self, name, attributes):
        asked = self._new("CreateQueueRequest").queueName(name).attributesWithStrings(mapped(attributes))
        return str(self._client.createQueue(asked.build()).queueUrl())

    def url(self, name):
        asked = self._new("GetQueueUrlRequest").queueName(name).build()
        return str(self._client.getQueueUrl(asked).queueUrl())

    def send(self, queue, body, group=None):
        text = self._new("MessageAttributeValue").dataType("String").stringValue("ü").build()
        binary = self._core.fromByteArray(jpype.JArray(jpype.JByte)(BINARY))
        raw = self._new("MessageAttributeValue").dataType("Binary").binaryValue(binary).build()
        asked = self._new("SendMessageRequest").queueUrl(queue).messageBody(body)
        if group is None:
            asked = asked.messageAttributes(mapped({"text": text, "raw": raw}))
        else:
            asked = asked.messageGroupId(group).messageDeduplicationId(body)
        return str(self._client.sendMessage(asked.build()).messageId())

    def send_batch(self, queue, bodies):
        entries = [
            self._new("SendMessageBatchRequestEntry").id(f"e{index}").messageBody(body).build()
            for index, body in enumerate(bodies)
        ]
        asked = self._new("SendMessageBatchRequest").queueUrl(queue).entries(listed(entries)).build()
        done = self._client.sendMessageBatch(asked)
        return [
            [str(one.id()) for one in done.successful()],
            [f"{one.id()} {one.code()}" for one in done.failed()],
        ]

    def receive(self, queue):
        asked = (
            self._new("ReceiveMessageRequest")
            .queueUrl(queue)
            .maxNumberOfMessages(jpype.JInt(10))
            .waitTimeSeconds(jpype.JInt(2))
            .messageSystemAttributeNamesWithStrings(listed(["All"]))
            .messageAttributeNames(listed(["All"]))
            .build()
        )
        return [
            {
                "body": str(one.body()),
                "handle": str(one.receiptHandle()),
                "system": texts(one.attributesAsStrings()),
                "attributes": {
                    str(name): str(value.stringValue() or value.binaryValue().asByteArray().length)
                    for name, value in one.messageAttributes().items()
                },
            }
            for one in self._client.receiveMessage(asked).messages()
        ]

    def change(self, queue, handle, seconds):
        asked = self._new("ChangeMessageVisibilityRequest").queueUrl(queue).receiptHandle(handle)
        self._client.changeMessageVisibility(asked.visibilityTimeout(jpype.JInt(seconds)).build())

    def delete(self, queue, handle):
        asked = self._new("DeleteMessageRequest").queueUrl(queue).receiptHandle(handle).build()
        self._client.deleteMessage(asked)

    def delete_batch(self, queue, handles):
        entries = [
            self._new("DeleteMessageBatchRequestEntry").id(f"d{index}").receiptHandle(one).build()
            for index, one in enumerate(handles)
        ]
        asked = self._new("DeleteMessageBatchRequest").queueUrl(queue).entries(listed(entries)).build()
        return [str(one.id()) for one in self._client.deleteMessageBatch(asked).successful()]

    def attributes(self, queue):
        asked = self._new("GetQueueAttributesRequest").queueUrl(queue)
        asked = asked.attributeNamesWithStrings(listed(["All"])).build()
        return texts(self._client.getQueueAttributes(asked).attributesAsStrings())

    def raised(self, error):
        return [str(error.getClass().getSimpleName()), str(error.awsErrorDetails().errorCode())]


class Sdk1:
    def __init__(self, endpoint):
        self._model = "com.amazonaws.services.sqs.model"
        configuration = jpype.JClass("com.amazonaws.client.builder.AwsClientBuilder$EndpointConfiguration")
        credentials = jpype.JClass("com.amazonaws.auth.BasicAWSCredentials")("x", "y")
        provider = jpype.JClass("com.amazonaws.auth.AWSStaticCredentialsProvider")(credentials)
        builder = jpype.JClass("com.amazonaws.services.sqs.AmazonSQSClientBuilder").standard()
        builder.setEndpointConfiguration(configuration(endpoint, REGION))
        builder.setCredentials(provider)
        self._client = builder.build()

    def _new(self, name, *given):
        return jpype.JClass(f"{self._model}.{name}")(*given)

    def create(self, name, attributes):
        asked = self._new("CreateQueueRequest", name).withAttributes(mapped(attributes))
        return str(self._client.createQueue(asked).getQueueUrl())

    def url(self, name):
        return str(self._client.getQueueUrl(name).getQueueUrl())

    def send(self, queue, body, group=None):
        asked = self._new("SendMessageRequest", queue, body)
        if group is None:
            text = self._new("MessageAttributeValue").withDataType("String").withStringValue("ü")
            raw = self._new("MessageAttributeValue").withDataType("Binary").withBinaryValue(buffer())
            asked = asked.withMessageAttributes(mapped({"text": text, "raw": raw}))
        else:
            asked = asked.withMessageGroupId(group).withMessageDeduplicationId(body)
        return str(self._client.sendMessage(asked).getMessageId())

    def send_batch(self, queue, bodies):
        entries = [
            self._new("SendMessageBatchRequestEntry", f"e{index}", body) for index, body in enumerate(bodies)
        ]
        done = self._client.sendMessageBatch(queue, listed(entries))
        return [
            [str(one.getId()) for one in done.getSuccessful()],
            [f"{one.getId()} {one.getCode()}" for one in done.getFailed()],
        ]

    def receive(self, queue):
        asked = self._new("ReceiveMessageRequest", queue)
        asked.setMaxNumberOfMessages(jpype.JInt(10))
        asked.setWaitTimeSeconds(jpype.JInt(2))
        asked.setAttributeNames(listed(["All"]))
        asked.setMessageAttributeNames(listed(["All"]))
        return [
            {
                "body": str(one.getBody()),
                "handle": str(one.getReceiptHandle()),
                "system": texts(one.getAttributes()),
                "attributes": {
                    str(name): str(value.getStringValue() or value.getBinaryValue().remaining())
                    for name, value in one.getMessageAttributes().items()
                },
            }
            for one in self._client.receiveMessage(asked).getMessages()
        ]

    def change(self, queue, handle, seconds):
        self._client.changeMessageVisibility(queue, handle, jpype.JInt(seconds))

    def delete(self, queue, handle):
        self._client.deleteMessage(queue, handle)

    def delete_batch(self, queue, handles):
        entries = [
            self._new("DeleteMessageBatchRequestEntry", f"d{index}", one) for index, one in enumerate(handles)
        ]
        done = self._client.deleteMessageBatch(queue, listed(entries))
        return [str(one.getId()) for one in done.getSuccessful()]

    def attributes(self, queue):
        return texts(self._client.getQueueAttributes(queue, listed(["All"])).getAttributes())

    def raised(self, error):
        return [str(error.getClass().getSimpleName()), str(error.getErrorCode())]


def run(sdk):
    """What a program in Java does, and what it gets."""
    found = {}
    queue = found["url"] = sdk.create("java", {"VisibilityTimeout": "45"})
    found["same"] = sdk.url("java")
    sdk.send(queue, "a\r\nü <&>")
    (found["received"],) = sdk.receive(queue)
    sdk.change(queue, found["received"]["handle"], 0)
    (again,) = sdk.receive(queue)
    found["count"] = again["system"]["ApproximateReceiveCount"]
    sdk.delete(queue, again["handle"])
    found["batch"] = sdk.send_batch(queue, ["1", "2", "\x01"])
    found["deleted"] = sdk.delete_batch(queue, [one["handle"] for one in sdk.receive(queue)])
    found["attributes"] = sdk.attributes(queue)
    fifo = sdk.create("java.fifo", {"FifoQueue": "true"})
    ids = [sdk.send(fifo, body, body[0]) for body in ("a1", "b1", "a2", "a1")]
    found["is_duplicate"] = ids[3] == ids[0]
    found["fifo"] = [[one["body"], one["system"]["MessageGroupId"]] for one in sdk.receive(fifo)]
    try:
        sdk.url("missing")
    except jpype.JException as error:
        found["raised"] = sdk.raised(error)
    return found


if __name__ == "__main__":
    start_jvm(sys.argv[1])
    print(json.dumps(run({"1": Sdk1, "2": Sdk2}[sys.argv[1]](sys.argv[2]))), flush=True)
    jpype.JClass("java.lang.Runtime").getRuntime().halt(0)  # threads of the client would keep it waiting
