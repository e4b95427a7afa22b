"""The requests of SQS's actions. Made by tests/gateway/sqs_model.py of botocore's model: change nothing here.

Every field may be missing: SQS has an error of its own for one that is `required`, which __init__.py raises.
"""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct


class AddPermissionRequest(Struct, frozen=True, gc=False):
    required: ClassVar[tuple[str, ...]] = ("QueueUrl", "Label", "AWSAccountIds", "Actions")
    QueueUrl: str | None = None
    Label: str | None = None
    AWSAccountIds: list[str] | None = None
    Actions: list[str] | None = None


class CancelMessageMoveTaskRequest(Struct, frozen=True, gc=False):
    required: ClassVar[tuple[str, ...]] = ("TaskHandle",)
    TaskHandle: str | None = None


class ChangeMessageVisibilityRequest(Struct, frozen=True, gc=False):
    required: ClassVar[tuple[str, ...]] = ("QueueUrl", "ReceiptHandle", "VisibilityTimeout")
    QueueUrl: str | None = None
    ReceiptHandle: str | None = None
    VisibilityTimeout: int | None = None


class ChangeMessageVisibilityBatchRequestEntry(Struct, frozen=True, gc=False):
    required: ClassVar[tuple[str, ...]] = ("Id", "ReceiptHandle")
    Id: str | None = None
    ReceiptHandle: str | None = None
    VisibilityTimeout: int | None = None


class ChangeMessageVisibilityBatchRequest(Struct, frozen=True, gc=False):
    required: ClassVar[tuple[str, ...]] = ("QueueUrl", "Entries")
    QueueUrl: str | None = None
    Entries: list[ChangeMessageVisibilityBatchRequestEntry] | None = None


class CreateQueueRequest(Struct, frozen=True, gc=False):
    required: ClassVar[tuple[str, ...]] = ("QueueName",)
    QueueName: str | None = None
    Attributes: dict[str, str] | None = None
    tags: dict[str, str] | None = None


class DeleteMessageRequest(Struct, frozen=True, gc=False):
    required: ClassVar[tuple[str, ...]] = ("QueueUrl", "ReceiptHandle")
    QueueUrl: str | None = None
    ReceiptHandle: str | None = None


class DeleteMessageBatchRequestEntry(Struct, frozen=True, gc=False):
    required: ClassVar[tuple[str, ...]] = ("Id", "ReceiptHandle")
    Id: str | None = None
    ReceiptHandle: str | None = None


class DeleteMessageBatchRequest(Struct, frozen=True, gc=False):
    required: ClassVar[tuple[str, ...]] = ("QueueUrl", "Entries")
    QueueUrl: str | None = None
    Entries: list[DeleteMessageBatchRequestEntry] | None = None


class DeleteQueueRequest(Struct, frozen=True, gc=False):
    required: ClassVar[tuple[str, ...]] = ("QueueUrl",)
    QueueUrl: str | None = None


class GetQueueAttributesRequest(Struct, frozen=True, gc=False):
    required: ClassVar[tuple[str, ...]] = ("QueueUrl",)
    QueueUrl: str | None = None
    AttributeNames: list[str] | None = None


class GetQueueUrlRequest(Struct, frozen=True, gc=False):
    required: ClassVar[tuple[str, ...]] = ("QueueName",)
    QueueName: str | None = None
    QueueOwnerAWSAccountId: str | None = None


class ListDeadLetterSourceQueuesRequest(Struct, frozen=True, gc=False):
    required: ClassVar[tuple[str, ...]] = ("QueueUrl",)
    QueueUrl: str | None = None
    NextToken: str | None = None
    MaxResults: int | None = None


class ListMessageMoveTasksRequest(Struct, frozen=True, gc=False):
    required: ClassVar[tuple[str, ...]] = ("SourceArn",)
    SourceArn: str | None = None
    MaxResults: int | None = None


class ListQueueTagsRequest(Struct, frozen=True, gc=False):
    required: ClassVar[tuple[str, ...]] = ("QueueUrl",)
    QueueUrl: str | None = None


class ListQueuesRequest(Struct, frozen=True, gc=False):
    required: ClassVar[tuple[str, ...]] = ()
    QueueNamePrefix: str | None = None
    NextToken: str | None = None
    MaxResults: int | None = None


class PurgeQueueRequest(Struct, frozen=True, gc=False):
    required: ClassVar[tuple[str, ...]] = ("QueueUrl",)
    QueueUrl: str | None = None


class ReceiveMessageRequest(Struct, frozen=True, gc=False):
    required: ClassVar[tuple[str, ...]] = ("QueueUrl",)
    QueueUrl: str | None = None
    AttributeNames: list[str] | None = None
    MessageSystemAttributeNames: list[str] | None = None
    MessageAttributeNames: list[str] | None = None
    MaxNumberOfMessages: int | None = None
    VisibilityTimeout: int | None = None
    WaitTimeSeconds: int | None = None
    ReceiveRequestAttemptId: str | None = None


class RemovePermissionRequest(Struct, frozen=True, gc=False):
    required: ClassVar[tuple[str, ...]] = ("QueueUrl", "Label")
    QueueUrl: str | None = None
    Label: str | None = None


class MessageAttributeValue(Struct, frozen=True, gc=False):
    required: ClassVar[tuple[str, ...]] = ("DataType",)
    StringValue: str | None = None
    BinaryValue: bytes | None = None
    StringListValues: list[str] | None = None
    BinaryListValues: list[bytes] | None = None
    DataType: str | None = None


class MessageSystemAttributeValue(Struct, frozen=True, gc=False):
    required: ClassVar[tuple[str, ...]] = ("DataType",)
    StringValue: str | None = None
    BinaryValue: bytes | None = None
    StringListValues: list[str] | None = None
    BinaryListValues: list[bytes] | None = None
    DataType: str | None = None


class SendMessageRequest(Struct, frozen=True, gc=False):
    required: ClassVar[tuple[str, ...]] = ("QueueUrl", "MessageBody")
    QueueUrl: str | None = None
    MessageBody: str | None = None
    DelaySeconds: int | None = None
    MessageAttributes: dict[str, MessageAttributeValue] | None = None
    MessageSystemAttributes: dict[str, MessageSystemAttributeValue] | None = None
    MessageDeduplicationId: str | None = None
    MessageGroupId: str | None = None


class SendMessageBatchRequestEntry(Struct, frozen=True, gc=False):
    required: ClassVar[tuple[str, ...]] = ("Id", "MessageBody")
    Id: str | None = None
    MessageBody: str | None = None
    DelaySeconds: int | None = None
    MessageAttributes: dict[str, MessageAttributeValue] | None = None
    MessageSystemAttributes: dict[str, MessageSystemAttributeValue] | None = None
    MessageDeduplicationId: str | None = None
    MessageGroupId: str | None = None


class SendMessageBatchRequest(Struct, frozen=True, gc=False):
    required: ClassVar[tuple[str, ...]] = ("QueueUrl", "Entries")
    QueueUrl: str | None = None
    Entries: list[SendMessageBatchRequestEntry] | None = None


class SetQueueAttributesRequest(Struct, frozen=True, gc=False):
    required: ClassVar[tuple[str, ...]] = ("QueueUrl", "Attributes")
    QueueUrl: str | None = None
    Attributes: dict[str, str] | None = None


class StartMessageMoveTaskRequest(Struct, frozen=True, gc=False):
    required: ClassVar[tuple[str, ...]] = ("SourceArn",)
    SourceArn: str | None = None
    DestinationArn: str | None = None
    MaxNumberOfMessagesPerSecond: int | None = None


class TagQueueRequest(Struct, frozen=True, gc=False):
    required: ClassVar[tuple[str, ...]] = ("QueueUrl", "Tags")
    QueueUrl: str | None = None
    Tags: dict[str, str] | None = None


class UntagQueueRequest(Struct, frozen=True, gc=False):
    required: ClassVar[tuple[str, ...]] = ("QueueUrl", "TagKeys")
    QueueUrl: str | None = None
    TagKeys: list[str] | None = None


REQUESTS: dict[str, type[Struct]] = {
    name.removesuffix("Request"): found for name, found in globals().items() if name.endswith("Request")
}
"""The requests by the names of their actions."""
