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
HANDLE = ("ReceiptHandleIsInvalid", "com.amazonaws.sqs#ReceiptHandleIsInvalid", 404)
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
NO_TYPE = (
    "The type of message (user) attribute 'a' is invalid. You must use only the following supported type "
    "prefixes: Binary, Number, String."
)
RESERVED = (
    "You can't use message attribute names beginning with 'AWS.' or 'Amazon'. These strings are reserved "
    "for internal use."
)
ILLEGAL = (
    "Message (user) attributes name can only contain upper and lower score characters, digits, periods, "
    "hyphens and underscores. "
)
NO_ARN = (
    "You must use this format to specify the {}: "
    "arn:<partition>:<service>:<region>:<account-id>:<resource-id>"
)
ALLOW = "Amazon SQS can't create the redrive allow policy"
UNFIT_ALLOW = (
    "Invalid value for the parameter RedriveAllowPolicy. Reason: "
    f"{ALLOW}, as it\N{RIGHT SINGLE QUOTATION MARK}s in an unsupported format."
)
MOST_LISTED = (
    "Value for parameter MaxResults is invalid. Reason: MaxResults must be an integer between 1 and 1000."
)
MOST_MOVED = (
    "Value for parameter MaxNumberOfMessagesPerSecond is invalid. Reason: You must enter a number that's "
    "between 1 and 500."
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
            "{}": "Redrive policy does not contain mandatory attribute: maxReceiveCount.",
            LATE.replace("}", ',"a":1}'): "Only following attributes are supported: "
            "[maxReceiveCount, deadLetterTargetArn].",
            LATE.replace("sqs", "sns"): "Only SQS queues are valid resources for deadLetterTargetArn.",
            OTHER_TYPE: "Dead-letter queue must be same type of queue as the source..",
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
        "The request must contain non-empty message (user) attribute names.",
    ),
    *(
        (
            "SendMessage",
            {**SEND, "MessageAttributes": {name: {"DataType": "String", "StringValue": "v"}}},
            VALUE,
            text,
        )
        for name, text in {
            **dict.fromkeys(["AWS.x", "amazon.x"], RESERVED),
            "a" * 257: "Message (user) attribute name must be shorter than 256 bytes.",
            ".a": "Message (user) attribute name must not begin with character '.'.",
            "a.": "Message (user) attribute name must not end with character '.'.",
            "a..b": "Message (user) attribute name must not have successive '.' characters.",
            "a§": ILLEGAL,
        }.items()
    ),
    (
        "SendMessage",
        message(DataType=""),
        VALUE,
        "The message (user) attribute 'a' must contain a non-empty message attribute value.",
    ),
    (
        "SendMessage",
        message(StringValue="v"),
        VALUE,
        "The message (user) attribute 'a' must contain a non-empty message attribute type.",
    ),
    (
        "SendMessage",
        message(DataType=f"String.{'a' * 250}", StringValue="v"),
        VALUE,
        "Message (user) attribute type must be shorter than 256 bytes.",
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
        "Message (user) attribute 'a' must contain a non-empty value of type 'String'.",
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
    (
        "ReceiveMessage",
        {"QueueUrl": "q", "VisibilityTimeout": 43201},
        VALUE,
        invalid(43201, "VisibilityTimeout", "Must be >= 0 and <= 43200, if provided."),
    ),
    (
        "GetQueueUrl",
        {"QueueName": ""},
        VALUE,
        "Value for parameter QueueName is invalid. Reason: Must specify a queue name.",
    ),
    (
        "SetQueueAttributes",
        {"QueueUrl": "q", "Attributes": {}},
        MISSING,
        "The request must contain the parameter Attribute.Name.",
    ),
    *(
        ("ListDeadLetterSourceQueues", {"QueueUrl": "q", **given}, VALUE, text)
        for given, text in (
            ({"MaxResults": 1001}, MOST_LISTED),
            ({"NextToken": "x"}, "Invalid or expired next token."),
        )
    ),
    *(
        (
            "SetQueueAttributes",
            attributes(Policy=json.dumps(given)),
            ATTRIBUTE,
            "Invalid value for the parameter Policy.",
        )
        for given in (
            {},
            {"Statement": []},
            {"Statement": [{"Other": 1}]},
            {"Statement": {}, "Version": "2020-01-01"},
            {"Statement": {}, "Other": 1},
        )
    ),
    *(
        (
            "SetQueueAttributes",
            attributes(RedriveAllowPolicy=given),
            ATTRIBUTE,
            UNFIT_ALLOW,
        )
        for given in (
            "x",
            "[]",
            "{}",
            '{"redrivePermission":"some"}',
            '{"redrivePermission":"allowAll","a":1}',
        )
    ),
    *(
        (
            "SetQueueAttributes",
            attributes(RedriveAllowPolicy=given),
            VALUE,
            invalid(given, "RedriveAllowPolicy", f"{ALLOW}. {text}"),
        )
        for given, text in {
            '{"redrivePermission":"byQueue"}': "When you specify the byQueue permission type, you must also "
            "specify one or more sourceQueueArns values.",
            '{"redrivePermission":"denyAll","sourceQueueArns":["a"]}': "To specify one or more source queue "
            "ARNs, you must set redrivePermission to byQueue.",
            json.dumps({"redrivePermission": "byQueue", "sourceQueueArns": ["a"] * 11}): "The maximum number "
            "of source queue ARNs you can specify is 10.",
        }.items()
    ),
    *(
        (action, {"QueueUrl": "q", "ReceiptHandle": "x", **more}, HANDLE, text)
        for action, more in (("DeleteMessage", {}), ("ChangeMessageVisibility", {"VisibilityTimeout": 1}))
        for text in ('The input receipt handle "x" is not a valid receipt handle.',)
    ),
    (
        "DeleteMessage",
        {"QueueUrl": "q", "ReceiptHandle": ""},
        MISSING,
        "The request must contain the parameter ReceiptHandle.",
    ),
    (
        "TagQueue",
        {"QueueUrl": "q", "Tags": {"": "v"}},
        VALUE,
        "Tag keys must be between 1 and 128 characters in length.",
    ),
    *(
        ("StartMessageMoveTask", {"SourceArn": f"{ARN}q", **given}, VALUE, text)
        for given, text in (
            ({"SourceArn": "x"}, NO_ARN.format("SourceArn")),
            ({"DestinationArn": "x"}, NO_ARN.format("DestinationArn")),
            (
                {"DestinationArn": f"{ARN}f.fifo"},
                "The source queue and destination queue must be of the same queue type.",
            ),
            ({"MaxNumberOfMessagesPerSecond": 501}, MOST_MOVED),
        )
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
        for name, given in {
            "q": {},
            "dead": {},
            "gone": {},
            "many": {},
            "f.fifo": {"FifoQueue": "true"},
        }.items():
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


def test_entries_of_a_batch_fail_as_on_aws(served):
    def failed(action, *entries):
        told = json.loads(ask(served, action, batch(*entries)).body)
        return [(one["Code"], one["Message"]) for one in told["Failed"]]

    lacks = "The request must contain the parameter {}."
    assert failed("SendMessageBatch", {"Id": "a"}, {"Id": "b", "MessageBody": ""}) == [
        (code, lacks.format("MessageBody")) for code in ("MissingParameter", "EmptyValue")
    ]
    assert failed("DeleteMessageBatch", {"Id": "a"}) == [("MissingParameter", lacks.format("ReceiptHandle"))]
    message = {"QueueUrl": "q", "MessageBody": "a"}
    assert ask(served, "SendMessage", message).status == 200
    (one,) = json.loads(ask(served, "ReceiveMessage", {"QueueUrl": "q"}).body)["Messages"]
    handle = one["ReceiptHandle"]
    changes = ({"Id": "a", "ReceiptHandle": handle, **given} for given in ({}, {"VisibilityTimeout": -1}))
    assert [failed("ChangeMessageVisibilityBatch", change) for change in changes] == [
        [("MissingParameter", lacks.format("ChangeMessageVisibilityBatchRequestEntry.1.VisibilityTimeout"))],
        [
            (
                "InvalidParameterValue",
                invalid(-1, "VisibilityTimeout", "VisibilityTimeout must be an integer between 0 and 43200."),
            )
        ],
    ]
    told = ask(served, "DeleteMessage", {"QueueUrl": "dead", "ReceiptHandle": handle})
    assert (told.status, json.loads(told.body)["message"]) == (
        404,
        f'The receipt handle "{handle}" is not valid for this queue.',
    )


def test_a_policy_has_twenty_statements(served):
    texts = []
    for n in range(21):
        answer = ask(served, "AddPermission", {**PERMIT, "QueueUrl": "many", "Label": f"l{n}"})
        texts.append(json.loads(answer.body).get("message"))
    assert texts == [None] * 20 + ["21 Statements were found, maximum allowed is 20."]
