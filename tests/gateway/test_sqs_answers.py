"""SQS's errors as AWS words them: code, shape, status and text of each, in both protocols.

Most texts were seen in answers of AWS: in issues of the SDKs and of Terraform, or in moto's tests. Where none
is given, nobody has shown us one.
"""

import json
import urllib.parse
from xml.etree import ElementTree as ET

import pytest
from gateway_support import fresh_memory, running

SERVICE = "AWS.SimpleQueueService."
VALUE = ("InvalidParameterValue", "com.amazon.coral.service#InvalidParameterValueException", 400)
MISSING = ("MissingParameter", "com.amazon.coral.service#MissingRequiredParameterException", 400)
ATTRIBUTE = ("InvalidAttributeValue", "com.amazonaws.sqs#InvalidAttributeValue", 400)
NAME = ("InvalidAttributeName", "com.amazonaws.sqs#InvalidAttributeName", 400)
HANDLE = ("ReceiptHandleIsInvalid", "com.amazonaws.sqs#ReceiptHandleIsInvalid", 400)
MOVE = ("ResourceNotFoundException", "com.amazonaws.sqs#ResourceNotFoundException", 404)
NO_QUEUE = (f"{SERVICE}NonExistentQueue", "com.amazonaws.sqs#QueueDoesNotExist", 400)


def own(name, status=400):
    return f"{SERVICE}{name}", f"com.amazonaws.sqs#{name}", status


SEND = {"QueueUrl": "q", "MessageBody": "a"}
FIFO = {"QueueUrl": "f.fifo", "MessageBody": "a", "MessageGroupId": "g", "MessageDeduplicationId": "d"}
ENTRY = {"Id": "a", "MessageBody": "a"}
ARN = "arn:aws:sqs:us-east-1:000000000000:"
PERMIT = {"QueueUrl": "q", "Label": "l", "AWSAccountIds": ["111111111111"], "Actions": ["SendMessage"]}
OF_OTHER_TYPE = "The request include parameter that is not valid for this queue type."
LATE = '{"deadLetterTargetArn":"arn:aws:sqs:us-east-1:000000000000:none","maxReceiveCount":3}'
OFTEN = '{"deadLetterTargetArn":"arn:aws:sqs:us-east-1:000000000000:dead","maxReceiveCount":1001}'
LACKS = '{"deadLetterTargetArn":"arn:aws:sqs:us-east-1:000000000000:dead"}'
OTHER_TYPE = '{"deadLetterTargetArn":"arn:aws:sqs:us-east-1:000000000000:f.fifo","maxReceiveCount":3}'

FIFO_NAME = (
    "The name of a FIFO queue can only include alphanumeric characters, hyphens, or underscores, "
    "must end with .fifo suffix and be 1 to 80 in length."
)
ONE_SSE = (
    "You can use one type of server-side encryption (SSE) at one time. You can either enable KMS SSE "
    "or SQS SSE."
)
NEEDS_DEDUP = (
    "The queue should either have ContentBasedDeduplication enabled or MessageDeduplicationId "
    "provided explicitly"
)
NO_VALUE = (
    "The message attribute 'a' must contain non-empty message attribute value for message attribute "
    "type 'String'."
)
NO_TYPE = (
    "The message attribute 'a' has an invalid message attribute type, the set of supported type "
    "prefixes is Binary, Number, and String."
)
ONLY_FIFO = "You can specify the {} only when FifoQueue is set to true."
BATCH_ID = (
    "A batch entry id can only contain alphanumeric characters, hyphens and underscores. It can be "
    "at most 80 letters long."
)


def without(body, *names):
    return {key: one for key, one in body.items() if key not in names}


def attributes(**given):
    return {"QueueUrl": "q", "Attributes": given}


def message(**value):
    return {**SEND, "MessageAttributes": {"a": value}}


def batch(*entries):
    return {"QueueUrl": "q", "Entries": list(entries)}


def invalid(value, name, reason):
    return f"Value {value} for parameter {name} is invalid. Reason: {reason}"


ROWS = [
    ("SendMessage", {**SEND, "QueueUrl": "none"}, NO_QUEUE, "The specified queue does not exist."),
    ("GetQueueUrl", {"QueueName": "none"}, NO_QUEUE, "The specified queue does not exist."),
    ("DeleteQueue", {"QueueUrl": "none"}, NO_QUEUE, "The specified queue does not exist."),
    ("ReceiveMessage", {"QueueUrl": "http://x/1/none"}, NO_QUEUE, "The specified queue does not exist."),
    (
        "CreateQueue",
        {"QueueName": "a b"},
        VALUE,
        "Can only include alphanumeric characters, hyphens, or underscores. 1 to 80 in length",
    ),
    (
        "CreateQueue",
        {"QueueName": "a", "Attributes": {"FifoQueue": "true"}},
        VALUE,
        FIFO_NAME,
    ),
    (
        "CreateQueue",
        {"QueueName": "q", "Attributes": {"DelaySeconds": "9"}},
        ("QueueAlreadyExists", "com.amazonaws.sqs#QueueNameExists", 400),
        "A queue already exists with the same name and a different value for attribute DelaySeconds",
    ),
    (
        "CreateQueue",
        {"QueueName": "gone"},
        own("QueueDeletedRecently"),
        "You must wait 60 seconds after deleting a queue before you can create another with the same name.",
    ),
    (
        "PurgeQueue",
        {"QueueUrl": "dead"},
        own("PurgeQueueInProgress", 403),
        "Only one PurgeQueue operation on dead is allowed every 60 seconds.",
    ),
    *(
        (action, {name: "q", "Attributes": {attribute: value}}, NAME, text)
        for action, name in (("CreateQueue", "QueueName"), ("SetQueueAttributes", "QueueUrl"))
        for attribute, value, text in (
            ("Some", "1", "Unknown Attribute Some."),
            ("FifoQueue", "false", "Unknown Attribute FifoQueue."),
            ("ContentBasedDeduplication", "true", "Unknown Attribute ContentBasedDeduplication."),
            ("DeduplicationScope", "queue", ONLY_FIFO.format("DeduplicationScope")),
            ("FifoThroughputLimit", "perQueue", ONLY_FIFO.format("FifoThroughputLimit")),
        )
    ),
    ("GetQueueAttributes", {"QueueUrl": "q", "AttributeNames": [""]}, NAME, "Unknown Attribute ."),
    (
        "SetQueueAttributes",
        attributes(VisibilityTimeout="43201"),
        ATTRIBUTE,
        "Invalid value for the parameter VisibilityTimeout.",
    ),
    (
        "SetQueueAttributes",
        {**attributes(FifoQueue="false"), "QueueUrl": "f.fifo"},
        ATTRIBUTE,
        "Invalid value for the parameter FifoQueue. Reason: Modifying queue type is not supported.",
    ),
    (
        "SetQueueAttributes",
        {**attributes(FifoThroughputLimit="perMessageGroupId"), "QueueUrl": "f.fifo"},
        ATTRIBUTE,
        None,
    ),
    (
        "SetQueueAttributes",
        attributes(KmsMasterKeyId="alias/x", SqsManagedSseEnabled="true"),
        NAME,
        ONE_SSE,
    ),
    *(
        (
            "SetQueueAttributes",
            attributes(RedrivePolicy=given),
            VALUE,
            invalid(given, "RedrivePolicy", reason),
        )
        for given, reason in {
            "{": "Redrive policy is not a valid JSON map.",
            '{"deadLetterTargetArn": "x", "maxReceiveCount": 3}': "Invalid value for deadLetterTargetArn.",
            LACKS: "Redrive policy does not contain mandatory attribute: maxReceiveCount.",
            LATE: "Dead letter target does not exist.",
            OTHER_TYPE: "Dead-letter queue must be same type of queue as the source.",
            OFTEN: "Invalid value for maxReceiveCount: 1001, valid values are from 1 to 1000 both inclusive.",
        }.items()
    ),
    (
        "SendMessage",
        {**SEND, "MessageBody": ""},
        MISSING,
        "The request must contain the parameter MessageBody.",
    ),
    (
        "SendMessage",
        without(SEND, "MessageBody"),
        MISSING,
        "The request must contain the parameter MessageBody.",
    ),
    (
        "SendMessage",
        {**SEND, "MessageBody": "\ufffe"},
        ("InvalidMessageContents", "com.amazonaws.sqs#InvalidMessageContents", 400),
        None,
    ),
    (
        "SendMessage",
        {**SEND, "MessageBody": "a" * 1_048_577},
        VALUE,
        "One or more parameters are invalid. Reason: Message must be shorter than 1048576 bytes.",
    ),
    (
        "SendMessage",
        {**SEND, "DelaySeconds": 901},
        VALUE,
        invalid(901, "DelaySeconds", "DelaySeconds must be >= 0 and <= 900."),
    ),
    (
        "SendMessage",
        {**SEND, "MessageDeduplicationId": "1"},
        VALUE,
        invalid(1, "MessageDeduplicationId", OF_OTHER_TYPE),
    ),
    ("SendMessage", {**FIFO, "DelaySeconds": 5}, VALUE, invalid(5, "DelaySeconds", OF_OTHER_TYPE)),
    (
        "SendMessage",
        without(FIFO, "MessageGroupId"),
        MISSING,
        "The request must contain the parameter MessageGroupId.",
    ),
    (
        "SendMessage",
        without(FIFO, "MessageDeduplicationId"),
        VALUE,
        NEEDS_DEDUP,
    ),
    (
        "SendMessage",
        {**FIFO, "MessageGroupId": "a b"},
        VALUE,
        invalid(
            "a b",
            "MessageGroupId",
            "MessageGroupId can only include alphanumeric and punctuation characters. 1 to 128 in length.",
        ),
    ),
    (
        "SendMessage",
        {**FIFO, "MessageDeduplicationId": "a" * 129},
        VALUE,
        invalid(
            "a" * 129,
            "MessageDeduplicationId",
            "MessageDeduplicationId can only include alphanumeric and punctuation characters. "
            "1 to 128 in length.",
        ),
    ),
    (
        "SendMessageBatch",
        {"QueueUrl": "f.fifo", "Entries": [{**ENTRY, "MessageDeduplicationId": "d"}]},
        VALUE,
        "The request must contain the parameter MessageGroupId.",
    ),
    (
        "SendMessage",
        {**SEND, "MessageAttributes": {"": {"DataType": "String", "StringValue": "v"}}},
        VALUE,
        "The request must contain non-empty message attribute name.",
    ),
    (
        "SendMessage",
        message(DataType="String", StringValue=""),
        VALUE,
        "Message (user) attribute 'a' must contain a non-empty value of type 'String'.",
    ),
    (
        "SendMessage",
        message(DataType="String"),
        VALUE,
        NO_VALUE,
    ),
    (
        "SendMessage",
        message(DataType="Text", StringValue="v"),
        VALUE,
        NO_TYPE,
    ),
    (
        "SendMessage",
        message(DataType="Number", StringValue="v"),
        VALUE,
        "Can't cast the value of message (user) attribute 'a' to a number.",
    ),
    (
        "SendMessageBatch",
        batch(*({**ENTRY, "Id": f"i{n}"} for n in range(11))),
        own("TooManyEntriesInBatchRequest"),
        "Maximum number of entries per request are 10. You have sent 11.",
    ),
    ("SendMessageBatch", batch(ENTRY, ENTRY), own("BatchEntryIdsNotDistinct"), "Id a repeated."),
    (
        "SendMessageBatch",
        batch({**ENTRY, "Id": "a b"}),
        own("InvalidBatchEntryId"),
        BATCH_ID,
    ),
    (
        "SendMessageBatch",
        batch(ENTRY, {"Id": "b", "MessageBody": "a" * 1_048_576}),
        own("BatchRequestTooLong"),
        "Batch requests cannot be longer than 1048576 bytes. You have sent 1048577 bytes.",
    ),
    (
        "ReceiveMessage",
        {"QueueUrl": "q", "MaxNumberOfMessages": 11},
        VALUE,
        invalid(11, "MaxNumberOfMessages", "Must be between 1 and 10, if provided."),
    ),
    (
        "ReceiveMessage",
        {"QueueUrl": "q", "WaitTimeSeconds": 21},
        VALUE,
        invalid(21, "WaitTimeSeconds", "Must be >= 0 and <= 20, if provided."),
    ),
    *(
        (action, {"QueueUrl": "q", "ReceiptHandle": "x", **more}, HANDLE, text)
        for action, more in (("DeleteMessage", {}), ("ChangeMessageVisibility", {"VisibilityTimeout": 1}))
        for text in ('The input receipt handle "x" is not a valid receipt handle.',)
    ),
    ("AddPermission", {**PERMIT, "Actions": []}, MISSING, "The request must contain the parameter Actions."),
    ("AddPermission", {**PERMIT, "Label": "there"}, VALUE, invalid("there", "Label", "Already exists.")),
    (
        "AddPermission",
        {**PERMIT, "Actions": ["RemovePermission"]},
        VALUE,
        invalid(
            "SQS:RemovePermission", "ActionName", "Only the queue owner is allowed to invoke this action."
        ),
    ),
    (
        "AddPermission",
        {**PERMIT, "Actions": ["*"] * 8},
        ("OverLimit", "com.amazonaws.sqs#OverLimit", 403),
        "8 Actions were found, maximum allowed is 7.",
    ),
    (
        "RemovePermission",
        {"QueueUrl": "q", "Label": "x"},
        VALUE,
        invalid("x", "Label", "can't find label on existing policy."),
    ),
    (
        "RemovePermission",
        {"QueueUrl": "dead", "Label": "x"},
        VALUE,
        invalid("x", "Label", "can't find label."),
    ),
    (
        "CancelMessageMoveTask",
        {"TaskHandle": "x"},
        VALUE,
        "Value for parameter TaskHandle is invalid.",
    ),
    ("TagQueue", {"QueueUrl": "q", "Tags": {}}, MISSING, "The request must contain the parameter Tags."),
    (
        "TagQueue",
        {"QueueUrl": "q", "Tags": {f"k{n}": "v" for n in range(51)}},
        VALUE,
        "Too many tags added for queue q.",
    ),
    (
        "UntagQueue",
        {"QueueUrl": "q", "TagKeys": []},
        VALUE,
        "Tag keys must be between 1 and 128 characters in length.",
    ),
    (
        "StartMessageMoveTask",
        {"SourceArn": f"{ARN}none"},
        MOVE,
        "The resource that you specified for the SourceArn parameter doesn't exist.",
    ),
    (
        "StartMessageMoveTask",
        {"SourceArn": f"{ARN}q"},
        VALUE,
        "Source queue must be configured as a Dead Letter Queue.",
    ),
]


@pytest.fixture(scope="module")
def served():
    with running(fresh_memory()) as found:
        for name, given in {"q": {}, "dead": {}, "gone": {}, "f.fifo": {"FifoQueue": "true"}}.items():
            assert ask(found, "CreateQueue", {"QueueName": name, "Attributes": given}).status == 200
        for action, body in (
            ("DeleteQueue", {"QueueUrl": "gone"}),
            ("PurgeQueue", {"QueueUrl": "dead"}),
            ("AddPermission", {**PERMIT, "Label": "there"}),
        ):
            assert ask(found, action, body).status == 200
        yield found


def ask(served, action, body):
    headers = {"X-Amz-Target": f"AmazonSQS.{action}", "Content-Type": "application/x-amz-json-1.0"}
    return served.ask("POST", "/", raw=json.dumps(body).encode(), headers=headers)


LISTS = {"AttributeNames": "AttributeName", "Actions": "ActionName", "AWSAccountIds": "AWSAccountId"}
MAPS = {"Attributes": "Attribute", "MessageAttributes": "MessageAttribute", "Tags": "Tag"}


def flat(action, body):
    """The values of a request as parameters of the query protocol."""
    found = {}
    for name, value in body.items():
        if isinstance(value, list):
            one = f"{action}RequestEntry" if name == "Entries" else LISTS.get(name, name)
            value = {f"{one}.{n}": part for n, part in enumerate(value, 1)}
        elif isinstance(value, dict) and name in MAPS:
            key = "Key" if name == "Tags" else "Name"
            value = {
                f"{MAPS[name]}.{n}.{end}": part
                for n, pair in enumerate(value.items(), 1)
                for end, part in zip((key, "Value"), pair, strict=True)
            }
        else:
            value = {name: value}
        for path, part in value.items():
            if isinstance(part, dict):
                found |= {f"{path}.{key}": one for key, one in part.items()}
            else:
                found[path] = part
    return found


@pytest.mark.parametrize(("action", "body", "fault", "text"), ROWS)
def test_errors_are_those_of_aws(served, action, body, fault, text):
    code, shape, status = fault
    answer = ask(served, action, body)
    told = json.loads(answer.body)
    assert (answer.status, told["__type"], answer.headers["x-amzn-query-error"]) == (
        status,
        shape,
        f"{code};Sender",
    )
    assert text in {told["message"], None}
    if any(value in ([], {}) for value in body.values()):
        return  # what is empty can't be said in the query protocol
    parameters = urllib.parse.urlencode({"Action": action, **flat(action, body)})
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = served.ask("POST", "/", raw=parameters.encode(), headers=headers)
    space = {"": "http://queue.amazonaws.com/doc/2012-11-05/"}
    error = ET.fromstring(answer.body).find("Error", space)
    found = [error.findtext(name, namespaces=space) for name in ("Type", "Code", "Message")]
    if fault is NO_QUEUE:
        text = "The specified queue does not exist for this wsdl version."
    assert (answer.status, found[:2]) == (status, ["Sender", code])
    assert text in {found[2], None}


def test_a_query_without_a_queue_has_no_valid_address(served):
    answer = served.ask("GET", "/?Action=ReceiveMessage&QueueUrl=")
    assert answer.status == 404
    assert b"<Code>InvalidAddress</Code>" in answer.body
    here = f"http://127.0.0.1:{served.gateway.port}/"
    assert f"The address {here} is not valid for this endpoint." in answer.body.decode()


def test_one_kind_of_encryption_is_shown(served):
    def shown():
        names = ["KmsMasterKeyId", "SqsManagedSseEnabled", "KmsDataKeyReusePeriodSeconds"]
        asked = {"QueueUrl": "q", "AttributeNames": names}
        return list(json.loads(ask(served, "GetQueueAttributes", asked).body)["Attributes"].values())

    assert shown() == ["true"]
    for given, wanted in (
        ({"KmsMasterKeyId": "alias/x"}, ["alias/x", "false", "300"]),
        ({"SqsManagedSseEnabled": "true"}, ["true"]),
        ({"KmsMasterKeyId": "x", "KmsDataKeyReusePeriodSeconds": "6000"}, ["x", "false", "6000"]),
        ({"KmsMasterKeyId": "", "KmsDataKeyReusePeriodSeconds": "300"}, ["false"]),
    ):
        assert ask(served, "SetQueueAttributes", attributes(**given)).status == 200
        assert shown() == wanted


def test_what_is_too_large_for_a_queue_is_told_otherwise_in_a_batch(served):
    assert ask(served, "SetQueueAttributes", attributes(MaximumMessageSize="1024")).status == 200
    entries = [{**ENTRY, "MessageBody": "a" * 1025}, {**ENTRY, "Id": "b", "MessageBody": "a" * 1024}]
    told = json.loads(ask(served, "SendMessageBatch", batch(*entries)).body)
    assert [one["Message"] for one in told["Failed"]] == [
        "One or more parameters cannot be validated. Reason: Message must be shorter than 1024 bytes."
    ]
    assert [one["Id"] for one in told["Successful"]] == ["b"]
