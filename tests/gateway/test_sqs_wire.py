"""SQS's two protocols byte by byte, its limits and errors; whatever comes, the gateway goes on."""

import base64
import json
import logging
import time
import urllib.parse
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import sqs_model
from gateway_support import fresh_memory, running
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kmqpy.gateway.dialects.sqs import celery, checksums, shapes
from kmqpy.gateway.dialects.sqs.reading import read_json
from kmqpy.gateway.dialects.sqs.values import Value

SERVICE = "AWS.SimpleQueueService"
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
SPACE = "{http://queue.amazonaws.com/doc/2012-11-05/}"


@pytest.fixture(scope="module")
def served():
    with running(fresh_memory(), sqs_rest_s=0.0) as found:
        assert call(found, "CreateQueue", {"QueueName": "q"}).status == 200
        yield found


def call(served, action, body, *, path="/", raw=None):
    """Ask in JSON."""
    headers = {"X-Amz-Target": f"AmazonSQS.{action}", "Content-Type": "application/x-amz-json-1.0"}
    return served.ask("POST", path, raw=json.dumps(body).encode() if raw is None else raw, headers=headers)


def get(served, path, *, accept="*/*", **parameters):
    """Ask by the query protocol in a URL."""
    return served.ask("GET", f"{path}?{urllib.parse.urlencode(parameters)}", headers={"Accept": accept})


def form(served, parameters, *, path="/", method="POST"):
    """Ask by the query protocol; the answer's status and XML."""
    text = urllib.parse.urlencode(parameters)
    if method == "GET":
        answer = served.ask("GET", f"{path}?{text}")
    else:
        answer = served.ask("POST", path, raw=text.encode(), headers=FORM)
    assert answer.headers["content-type"] == "text/xml"
    return answer.status, ET.fromstring(answer.body)


def texts(xml, path):
    return [one.text for one in xml.findall("/".join(SPACE + part for part in path.split("/")))]


def test_shapes_are_those_of_botocore():
    assert Path(shapes.__file__).read_text() == sqs_model.text()


def test_checksums_are_those_of_aws():
    number = Value("Number", b"1493147359900")
    assert (
        checksums.of_attributes({"SOME_Valid.attribute-Name": number}) == "36655e7e9d7c0e8479fa3f3f42247ae7"
    )
    mixed = {
        "id": Value("String", b"453ae55e-f03b-21a6-a4b1-70c2e2e8fe71"),
        "mybin": Value("Binary", b"kekchebukek"),
        "timestamp": Value("Number.java.lang.Long", b"1603134247654"),
        "contentType": Value("String", b"application/json"),
    }
    assert checksums.of_attributes(mixed) == "049075255ebc53fb95f7f9f3cedf3c50"


@pytest.mark.parametrize("is_plain", [True, False])
def test_tasks_of_celery_wait_for_their_eta(is_plain):
    def body(eta, begins="body"):
        text = json.dumps({begins: "W10=", "headers": {"eta": eta, "id": "1"}, "properties": {}}).encode()
        return text if is_plain else base64.b64encode(text)

    assert celery.wait_s(body("1970-01-01T00:01:00+00:00"), 20_000) == 40
    assert celery.wait_s(body("1970-01-01T00:01:00"), 20_000) == 40
    assert celery.wait_s(body("1970-03-01T00:01:00+00:00"), 20_000) == 7 * 86_400
    assert celery.wait_s(body("1970-01-01T00:00:10Z"), 20_000) == 0
    for other in (body(None), body("soon"), body(5), body("1970-01-01T00:01:00", "text"), body("0001-01-01")):
        assert celery.wait_s(other, 20_000) == 0
    for other in (b'{"body": ', b"eyJib2R5Ijog\xff", b'{"body": 1, "headers": []}', b""):
        assert celery.wait_s(other, 20_000) == 0


def test_json_errors_have_both_names(served):
    answer = call(served, "SendMessage", {"QueueUrl": "none", "MessageBody": "a"})
    assert answer.status == 400
    assert answer.headers["content-type"] == "application/x-amz-json-1.0"
    assert answer.headers["x-amzn-query-error"] == f"{SERVICE}.NonExistentQueue;Sender"
    assert answer.headers["x-amzn-requestid"]
    assert json.loads(answer.body) == {
        "__type": "com.amazonaws.sqs#QueueDoesNotExist",
        "message": "The specified queue does not exist.",
    }


@pytest.mark.parametrize("url", ["q", "/1/q", "http://elsewhere.example/123456789012/q", None])
def test_a_queue_is_named_by_any_url_or_by_the_path(served, url):
    body = {"MessageBody": "a"} if url is None else {"MessageBody": "a", "QueueUrl": url}
    assert call(served, "SendMessage", body, path="/1/q" if url is None else "/").status == 200
    assert call(served, "PurgeQueue", {"QueueUrl": "q"}).status == 200


def test_urls_have_the_host_of_the_request_or_the_configured_one(served):
    host = {"Host": "localhost:1"}
    answer = served.ask("GET", "/?Action=GetQueueUrl&QueueName=q", headers=host)
    assert b"http://localhost:1/000000000000/q<" in answer.body
    options = {"public_url": "https://sqs.example/", "region": "eu-central-1", "account": "123456789012"}
    with running(fresh_memory(), **options) as other:
        made = json.loads(call(other, "CreateQueue", {"QueueName": "q"}).body)
        assert made == {"QueueUrl": "https://sqs.example/123456789012/q"}
        asked = {"QueueUrl": "q", "AttributeNames": ["QueueArn"]}
        arn = json.loads(call(other, "GetQueueAttributes", asked).body)["Attributes"]["QueueArn"]
        assert arn == "arn:aws:sqs:eu-central-1:123456789012:q"


def test_the_query_protocol_has_flat_lists_and_answers_xml(served):
    status, xml = form(
        served,
        {
            "Action": "CreateQueue",
            "Version": "2012-11-05",
            "QueueName": "flat",
            "Attribute.1.Name": "VisibilityTimeout",
            "Attribute.1.Value": "40",
            "Tag.1.Key": "team",
            "Tag.1.Value": "a&b",
        },
    )
    assert status == 200
    (url,) = texts(xml, "CreateQueueResult/QueueUrl")
    path = urllib.parse.urlsplit(url).path
    sent = {
        "Action": "SendMessageBatch",
        "SendMessageBatchRequestEntry.1.Id": "a",
        "SendMessageBatchRequestEntry.1.MessageBody": "<\r\n&>",
        "SendMessageBatchRequestEntry.1.MessageAttribute.1.Name": "bytes",
        "SendMessageBatchRequestEntry.1.MessageAttribute.1.Value.DataType": "Binary",
        "SendMessageBatchRequestEntry.1.MessageAttribute.1.Value.BinaryValue": "AAH/",
        "SendMessageBatchRequestEntry.2.Id": "b",
        "SendMessageBatchRequestEntry.2.MessageBody": "\x01",
    }
    status, xml = form(served, sent, path=path)
    assert texts(xml, "SendMessageBatchResult/SendMessageBatchResultEntry/Id") == ["a"]
    assert texts(xml, "SendMessageBatchResult/BatchResultErrorEntry/Code") == ["InvalidMessageContents"]
    asked = {
        "Action": "ReceiveMessage",
        "AttributeName.1": "All",
        "MessageAttributeName.1": "b.*",
        "MessageAttributeName.2": "bytes",
    }
    status, xml = form(served, asked, path=path, method="GET")
    message = "ReceiveMessageResult/Message/"
    assert texts(xml, f"{message}Body") == ["<\r\n&>"]
    assert "ApproximateReceiveCount" in texts(xml, f"{message}Attribute/Name")
    assert texts(xml, f"{message}MessageAttribute/Value/BinaryValue") == ["AAH/"]
    (handle,) = texts(xml, f"{message}ReceiptHandle")
    status, xml = form(served, {"Action": "DeleteMessage", "ReceiptHandle": handle}, path=path)
    assert (status, xml.tag) == (200, f"{SPACE}DeleteMessageResponse")
    assert texts(xml, "ResponseMetadata/RequestId")
    asked = {"Action": "GetQueueAttributes", "AttributeName.1": "VisibilityTimeout"}
    assert texts(form(served, asked, path=path)[1], "GetQueueAttributesResult/Attribute/Value") == ["40"]
    tags = form(served, {"Action": "ListQueueTags"}, path=path)[1]
    assert texts(tags, "ListQueueTagsResult/Tag/Value") == ["a&b"]


def test_at_the_url_of_a_queue_some_actions_are_none(served):
    for action in ("CreateQueue", "ListQueues"):
        answer = get(served, "/000000000000/q", Action=action, QueueName="new")
        assert (answer.status, b"<Code>InvalidAction</Code>" in answer.body) == (400, True)
        assert f"<Message>The action {action} is not valid for this endpoint.<".encode() in answer.body
    for accept in ("*/*", "application/json"):
        answer = served.ask("GET", "/000000000000/q", headers={"Accept": accept})
        assert (answer.status, answer.body) == (404, b"<UnknownOperationException/>")
    assert b"<ReceiveMessageResult/>" in get(served, "/000000000000/q", Action="ReceiveMessage").body


def test_queries_may_be_answered_in_json(served):
    def told(path="/000000000000/q", **parameters):
        return get(served, path, accept="application/json", **parameters).json

    listed = told("/", Action="ListQueues", QueueNamePrefix="q")["ListQueuesResponse"]
    here = f"http://127.0.0.1:{served.gateway.port}/000000000000/q"
    assert listed["ListQueuesResult"] == {"queueUrls": [here]}
    assert listed["ResponseMetadata"]["RequestId"]
    error = told(Action="ListQueues")["Error"]
    assert (error["Type"], error["Code"]) == ("Sender", "InvalidAction")
    assert told(Action="PurgeQueue").keys() == {"PurgeQueueResponse"}
    body = '"&quot;\r<'
    value = {"MessageAttribute.1.Value.DataType": "Binary", "MessageAttribute.1.Value.BinaryValue": "AAH/"}
    assert told(Action="SendMessage", MessageBody=body, **value, **{"MessageAttribute.1.Name": "a"})
    asked = {"Action": "ReceiveMessage", "MessageAttributeName.1": "All", "AttributeName.1": "SenderId"}
    (message,) = told(**asked)["ReceiveMessageResponse"]["ReceiveMessageResult"]["messages"]
    assert message["Body"] == body
    assert message["Attributes"] == [{"Name": "SenderId", "Value": "000000000000"}]
    value = {"DataType": "Binary", "BinaryValue": "AAH/"}
    assert message["MessageAttributes"] == [{"Name": "a", "Value": value}]
    assert told(**asked)["ReceiveMessageResponse"]["ReceiveMessageResult"] == {"messages": None}


def test_attribute_names_beat_the_newer_parameter_only_in_the_query_protocol(served):
    asked = {"AttributeName.1": "SenderId", "MessageSystemAttributeName.1": "All"}
    call(served, "SendMessage", SEND)
    found = get(served, "/1/q", Action="ReceiveMessage", VisibilityTimeout=0, **asked).body
    assert found.count(b"<Attribute>") == 1
    body = {"QueueUrl": "q", "AttributeNames": ["SenderId"], "MessageSystemAttributeNames": ["All"]}
    (message,) = json.loads(call(served, "ReceiveMessage", body).body)["Messages"]
    assert len(message["Attributes"]) == 4
    assert call(served, "PurgeQueue", {"QueueUrl": "q"}).status == 200


def test_a_trace_in_the_head_of_a_request_is_an_attribute_of_its_messages(served):
    given = {"DataType": "String", "StringValue": "Root=1-2"}
    for body, wanted in (
        ({}, "Root=1-1"),
        ({"MessageSystemAttributes": {"AWSTraceHeader": given}}, "Root=1-2"),
    ):
        for action, sent in (
            ("SendMessage", {**SEND, **body}),
            ("SendMessageBatch", {"QueueUrl": "q", "Entries": [{**ENTRY, **body}]}),
        ):
            headers = {"X-Amz-Target": f"AmazonSQS.{action}", "X-Amzn-Trace-Id": "Root=1-1"}
            assert served.ask("POST", "/", raw=json.dumps(sent).encode(), headers=headers).status == 200
            asked = {"QueueUrl": "q", "MessageSystemAttributeNames": ["AWSTraceHeader"]}
            (message,) = json.loads(call(served, "ReceiveMessage", asked).body)["Messages"]
            assert message["Attributes"] == {"AWSTraceHeader": wanted}
    assert call(served, "PurgeQueue", {"QueueUrl": "q"}).status == 200


@pytest.mark.parametrize(
    ("parameters", "code"),
    [
        ({"Action": "Nothing"}, "InvalidAction"),
        ({"Nothing": "1"}, "InvalidAction"),
        ({"Action": "SendMessage", "QueueUrl": "q"}, "MissingParameter"),
        ({"Action": "ReceiveMessage", "QueueUrl": "q", "WaitTimeSeconds": "x"}, "MalformedInput"),
        ({"Action": "ReceiveMessage", "QueueUrl.1": "q"}, "MalformedInput"),
        ({"Action": "ReceiveMessage", "QueueUrl": "q", "AttributeName.x": "All"}, "MalformedInput"),
        ({"Action": "GetQueueUrl", "QueueName": "none"}, f"{SERVICE}.NonExistentQueue"),
    ],
)
def test_errors_of_the_query_protocol(served, parameters, code):
    status, xml = form(served, parameters)
    assert (status, texts(xml, "Error/Code"), texts(xml, "Error/Type")) == (400, [code], ["Sender"])


SEND = {"QueueUrl": "q", "MessageBody": "a"}
ENTRY = {"Id": "a", "MessageBody": "a"}


def attribute(name="a", kind="String", value="v", **others):
    return {"MessageAttributes": {name: {"DataType": kind, "StringValue": value, **others}}}


LIMITS = [
    ("CreateQueue", {"QueueName": "a.b"}, "InvalidParameterValue"),
    ("CreateQueue", {"QueueName": "a" * 81}, "InvalidParameterValue"),
    ("CreateQueue", {"QueueName": ""}, "InvalidParameterValue"),
    ("CreateQueue", {"QueueName": "a", "Attributes": {"FifoQueue": "true"}}, "InvalidParameterValue"),
    ("CreateQueue", {"QueueName": "a.fifo"}, "InvalidParameterValue"),
    ("CreateQueue", {"QueueName": "a", "Attributes": {"FifoQueue": "false"}}, "InvalidAttributeName"),
    (
        "CreateQueue",
        {"QueueName": "a.fifo", "Attributes": {"FifoQueue": "true", "DeduplicationScope": "all"}},
        "InvalidAttributeValue",
    ),
    ("CreateQueue", {"QueueName": "a", "Attributes": {"Other": "1"}}, "InvalidAttributeName"),
    *(
        ("SetQueueAttributes", {"QueueUrl": "q", "Attributes": {name: value}}, "InvalidAttributeValue")
        for name, values in {
            "VisibilityTimeout": ["-1", "43201", "a", "", "1.5", "²"],
            "MessageRetentionPeriod": ["59", "1209601"],
            "DelaySeconds": ["901"],
            "ReceiveMessageWaitTimeSeconds": ["21"],
            "MaximumMessageSize": ["1023", "1048577"],
            "Policy": ["{", "[]"],
            "SqsManagedSseEnabled": ["perhaps"],
        }.items()
        for value in values
    ),
    *(
        ("SetQueueAttributes", {"QueueUrl": "q", "Attributes": {name: value}}, "InvalidParameterValue")
        for name, values in {
            "RedrivePolicy": [
                "{",
                "{}",
                '{"deadLetterTargetArn":"arn:aws:sqs:us-east-1:000000000000:none","maxReceiveCount":1}',
                '{"deadLetterTargetArn":"q","maxReceiveCount":1}',
                '{"deadLetterTargetArn":"arn:aws:sqs:us-east-1:000000000000:q","maxReceiveCount":0}',
                '{"deadLetterTargetArn":"arn:aws:sqs:us-east-1:000000000000:q","maxReceiveCount":1001}',
                '{"deadLetterTargetArn":"arn:aws:sqs:us-east-1:000000000000:q","maxReceiveCount":true}',
                '{"deadLetterTargetArn":"arn:aws:sqs:us-east-1:000000000000:q"}',
            ],
        }.items()
        for value in values
    ),
    ("SendMessage", {"QueueUrl": "q", "MessageBody": ""}, "MissingParameter"),
    ("SendMessage", {**SEND, "MessageBody": "\x00"}, "InvalidMessageContents"),
    ("SendMessage", {**SEND, "MessageBody": "\uffff"}, "InvalidMessageContents"),
    ("SendMessage", {**SEND, "MessageBody": "a" * 1_048_577}, "InvalidParameterValue"),
    ("SendMessage", {**SEND, "MessageBody": "a" * 1_048_569, **attribute()}, "InvalidParameterValue"),
    ("SendMessage", {**SEND, **attribute(value="\U0001f600" * 300_000)}, "InvalidParameterValue"),
    ("SendMessage", {**SEND, "DelaySeconds": -1}, "InvalidParameterValue"),
    ("SendMessage", {**SEND, "DelaySeconds": 901}, "InvalidParameterValue"),
    ("SendMessage", {**SEND, "DelaySeconds": "1"}, "MalformedInput"),
    ("SendMessage", {**SEND, "MessageDeduplicationId": "1"}, "InvalidParameterValue"),
    ("SendMessage", {**SEND, "MessageGroupId": "é"}, "InvalidParameterValue"),
    *(
        ("SendMessage", {**SEND, **attribute(name)}, "InvalidParameterValue")
        for name in ("", "aws.x", "Amazon.x", ".a", "a.", "a..b", "a b", "a§", "a" * 257)
    ),
    *(
        ("SendMessage", {**SEND, **attribute(kind=kind)}, "InvalidParameterValue")
        for kind in ("", "Text", "String.", "Number", "Binary", f"String.{'a' * 250}")
    ),
    ("SendMessage", {**SEND, **attribute(value="")}, "InvalidParameterValue"),
    ("SendMessage", {**SEND, **attribute(value="\x00")}, "InvalidParameterValue"),
    ("SendMessage", {**SEND, **attribute(StringListValues=["a"])}, f"{SERVICE}.UnsupportedOperation"),
    (
        "SendMessage",
        {
            **SEND,
            "MessageAttributes": {f"a{n}": {"DataType": "Number", "StringValue": "1"} for n in range(11)},
        },
        "InvalidParameterValue",
    ),
    (
        "SendMessage",
        {**SEND, "MessageSystemAttributes": attribute("Other")["MessageAttributes"]},
        "InvalidParameterValue",
    ),
    ("SendMessageBatch", {"QueueUrl": "q", "Entries": []}, f"{SERVICE}.EmptyBatchRequest"),
    ("SendMessageBatch", {"QueueUrl": "q", "Entries": [ENTRY, ENTRY]}, f"{SERVICE}.BatchEntryIdsNotDistinct"),
    (
        "SendMessageBatch",
        {"QueueUrl": "q", "Entries": [{**ENTRY, "Id": "a b"}]},
        f"{SERVICE}.InvalidBatchEntryId",
    ),
    (
        "SendMessageBatch",
        {"QueueUrl": "q", "Entries": [{**ENTRY, "Id": str(n)} for n in range(11)]},
        f"{SERVICE}.TooManyEntriesInBatchRequest",
    ),
    (
        "SendMessageBatch",
        {"QueueUrl": "q", "Entries": [{"Id": str(n), "MessageBody": "a" * 600_000} for n in range(2)]},
        f"{SERVICE}.BatchRequestTooLong",
    ),
    ("ReceiveMessage", {"QueueUrl": "q", "MaxNumberOfMessages": 0}, "InvalidParameterValue"),
    ("ReceiveMessage", {"QueueUrl": "q", "MaxNumberOfMessages": 11}, "InvalidParameterValue"),
    ("ReceiveMessage", {"QueueUrl": "q", "WaitTimeSeconds": 21}, "InvalidParameterValue"),
    ("ReceiveMessage", {"QueueUrl": "q", "VisibilityTimeout": 43_201}, "InvalidParameterValue"),
    ("ReceiveMessage", {"QueueUrl": "q", "AttributeNames": ["Other"]}, "InvalidAttributeName"),
    ("DeleteMessage", {"QueueUrl": "q", "ReceiptHandle": "é"}, "ReceiptHandleIsInvalid"),
    (
        "DeleteMessage",
        {"QueueUrl": "q", "ReceiptHandle": base64.b64encode(b"a" * 40).decode()},
        "ReceiptHandleIsInvalid",
    ),
    ("GetQueueAttributes", {"QueueUrl": "q", "AttributeNames": ["Other"]}, "InvalidAttributeName"),
    (
        "SetQueueAttributes",
        {
            "QueueUrl": "q",
            "Attributes": {"RedrivePolicy": '{"deadLetterTargetArn":"a","maxReceiveCount":"\\ud800"}'},
        },
        "InvalidParameterValue",
    ),
    ("ListQueues", {"MaxResults": 0}, "InvalidParameterValue"),
    ("ListQueues", {"MaxResults": 1001}, "InvalidParameterValue"),
    ("ListQueues", {"MaxResults": 1, "NextToken": "é"}, "InvalidParameterValue"),
    ("TagQueue", {"QueueUrl": "q", "Tags": {}}, "MissingParameter"),
    ("TagQueue", {"QueueUrl": "q", "Tags": {"": "a"}}, "InvalidParameterValue"),
    ("UntagQueue", {"QueueUrl": "q", "TagKeys": []}, "InvalidParameterValue"),
    (
        "AddPermission",
        {"QueueUrl": "q", "Label": "a b", "AWSAccountIds": ["1"], "Actions": ["*"]},
        "InvalidParameterValue",
    ),
    (
        "AddPermission",
        {"QueueUrl": "q", "Label": "a", "AWSAccountIds": ["1"], "Actions": ["Fly"]},
        "InvalidParameterValue",
    ),
    (
        "AddPermission",
        {"QueueUrl": "q", "Label": "a", "AWSAccountIds": ["1"], "Actions": ["*"] * 8},
        "OverLimit",
    ),
    ("RemovePermission", {"QueueUrl": "q", "Label": "none"}, "InvalidParameterValue"),
]


@pytest.mark.parametrize(("action", "body", "code"), LIMITS)
def test_what_is_above_a_limit_is_refused(served, action, body, code):
    answer = call(served, action, body)
    assert (answer.headers.get("x-amzn-query-error", "").split(";")[0], answer.status) == (
        code,
        {"OverLimit": 403, "ReceiptHandleIsInvalid": 404}.get(code, 400),
    ), answer


def test_what_is_just_within_limits_is_taken(served):
    largest = {**SEND, "MessageBody": "a" * 1_048_568, **attribute()}
    assert call(served, "SendMessage", largest).status == 200
    assert call(served, "SendMessage", {**SEND, **attribute("attr.1øßä")}).status == 200
    for number in ("1", "-1.", ".5", "+1e-3"):
        assert call(served, "SendMessage", {**SEND, **attribute(kind="Number.x", value=number)}).status == 200
    assert call(served, "PurgeQueue", {"QueueUrl": "q"}).status == 200


@pytest.mark.parametrize(
    "raw", [b"{", b"[]", b"\xff", b'{"QueueUrl":[]}', b'{"QueueUrl":"\\ud800"}', b"[" * 5_000]
)
def test_malformed_json_is_refused(served, raw):
    answer = call(served, "SendMessage", None, raw=raw)
    assert (answer.status, json.loads(answer.body)["__type"]) == (
        400,
        "com.amazon.coral.service#SerializationException",
    )


def test_a_request_of_many_wrong_values_is_read_soon():
    attributes = ",".join(f'"{n}":{{}}' for n in range(100_000))
    begun_s = time.process_time()
    read_json("SendMessage", f'{{"MessageBody":1,"MessageAttributes":{{{attributes}}}}}'.encode())
    assert time.process_time() - begun_s < 2


def test_numbers_and_flags_are_texts_where_texts_are_to_be(served):
    value = {"DataType": "String", "StringValue": 2.5, "BinaryValue": None}
    body = {"QueueUrl": "q", "MessageBody": True, "MessageAttributes": {"a": value}, "DelaySeconds": None}
    assert call(served, "SendMessage", body).status == 200
    asked = {"QueueUrl": "q", "MessageAttributeNames": ["All"]}
    (message,) = json.loads(call(served, "ReceiveMessage", asked).body)["Messages"]
    assert (message["Body"], message["MessageAttributes"]["a"]["StringValue"]) == ("true", "2.5")
    sent = {"QueueUrl": "q", "Entries": [{"Id": 5, "MessageBody": "a"}]}
    (one,) = json.loads(call(served, "SendMessageBatch", sent).body)["Successful"]
    assert one["Id"] == "5"
    assert call(served, "PurgeQueue", {"QueueUrl": "q"}).status == 200
    given = {"DelaySeconds": 400, "VisibilityTimeout": None}
    assert call(served, "CreateQueue", {"QueueName": "cast", "Attributes": given}).status == 200
    assert (
        call(served, "CreateQueue", {"QueueName": "cast", "Attributes": {"DelaySeconds": "400"}}).status
        == 200
    )
    for changed, text in (
        ({"MessageBody": {}}, "Start of structure or map found where not expected."),
        ({"MessageBody": []}, "Start of list found where not expected"),
        ({"DelaySeconds": "1"}, "STRING_VALUE can not be converted to an Integer"),
    ):
        assert json.loads(call(served, "SendMessage", {**SEND, **changed}).body)["message"] == text


def test_what_is_not_for_sqs_is_not_found(served):
    assert served.ask("POST", "/", {"a": 1}).status == 404
    assert served.ask("HEAD", "/?Action=PurgeQueue&QueueUrl=q").status == 400


def test_web_pages_are_kept_out(served):
    answer = served.ask(
        "POST", "/", raw=b"Action=ListQueues", headers={**FORM, "Origin": "http://evil.example"}
    )
    assert answer.status == 403


class Errors(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.found = []

    def emit(self, record):
        if record.exc_info or record.levelno >= logging.ERROR:
            self.found.append(self.format(record))


NAMES = sorted({name for kind in shapes.REQUESTS.values() for name in kind.__struct_fields__})
TEXTS = st.one_of(
    st.sampled_from(["q", "", "a", "All", "1", "{}", "0", "é", "x" * 300]), st.text(max_size=20)
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 60_000), TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(
                st.sampled_from(["Id", "DataType", "StringValue", "BinaryValue", "MessageBody"]), TEXTS
            ),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=8,
)
BODIES = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5)
PARTS = st.sampled_from(["1", "2", "Name", "Value", "Key", "Id", "DataType", "StringValue", "x", ""])
PARAMETERS = st.dictionaries(
    st.tuples(
        st.sampled_from([*NAMES, "Attribute", "Tag", "MessageAttribute", "SendMessageBatchRequestEntry"]),
        st.lists(PARTS, max_size=4),
    ).map(lambda one: ".".join([one[0], *one[1]])),
    TEXTS,
    max_size=6,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(action=st.sampled_from(sorted(shapes.REQUESTS)), body=BODIES, parameters=PARAMETERS)
def test_whatever_comes_is_no_server_error(served, action, body, parameters):
    errors = Errors()
    logging.getLogger("kmqpy").addHandler(errors)
    try:
        body = {"QueueUrl": "q", **body}
        body.pop("WaitTimeSeconds", None)
        assert call(served, action, body).status < 500
        parameters = {key: one for key, one in parameters.items() if key != "WaitTimeSeconds"}
        assert form(served, {"Action": action, "QueueUrl": "q", **parameters})[0] < 500
        assert not errors.found
        assert call(served, "CreateQueue", {"QueueName": "q"}).status in {200, 400}
    finally:
        logging.getLogger("kmqpy").removeHandler(errors)
