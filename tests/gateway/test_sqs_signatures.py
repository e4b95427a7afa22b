"""SQS's signatures: in headers and in URLs, by keys that the operator's key makes."""

import base64
import json
import urllib.parse
from datetime import UTC, datetime, timedelta

import boto3
import pytest
from botocore.auth import SigV4Auth, SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import ClientError
from gateway_support import running
from sqs_support import code

from kmqpy.errors import ConfigError
from kmqpy.gateway.dialects.sqs.policies import verdict
from kmqpy.gateway.keys.keyring import new_key, rotated
from kmqpy.gateway.keys.stores import FileKeys
from kmqpy.queue import storage_for

OPERATOR_KEY = b"k" * 32
ARN = "arn:aws:sqs:us-east-1:000000000000:"
ALLOWS = {"Effect": "Allow", "Principal": "*", "Action": "SQS:SendMessage", "Resource": "*"}


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    store = FileKeys(tmp_path_factory.mktemp("keys") / "keys.json")
    made = {}
    for title, roles, permissions in [
        ("standard", ["queue_standard"], []),
        ("admin", ["queue_admin"], []),
        ("sender", [], ["queue|post|jobs-*"]),
        ("team", [], ["queue|*|team-*"]),
    ]:
        made[title] = new_key(title, roles, permissions, operator_key=OPERATOR_KEY)
        store.put(made[title][0])
    other, secret = new_key("EmoDB's", ["queue_admin"], [])
    store.put(other)
    return store, {
        **{title: (key.id, secret) for title, (key, secret) in made.items()},
        "other": (other.id, secret),
    }


@pytest.fixture(scope="module")
def served(keys, tmp_path_factory):
    url = f"sqlite:///{tmp_path_factory.mktemp('signed') / 'queues.db'}"
    with running(storage_for(url), keys[0], aws_key=OPERATOR_KEY) as found:
        yield found


def client(served, pair):
    return boto3.client(
        "sqs",
        endpoint_url=f"http://127.0.0.1:{served.gateway.port}",
        region_name="eu-north-1",
        aws_access_key_id=pair[0],
        aws_secret_access_key=pair[1],
        config=Config(retries={"total_max_attempts": 1}),
    )


def test_keys_may_do_what_their_permissions_say(served, keys):
    admin, standard, sender = (client(served, keys[1][name]) for name in ("admin", "standard", "sender"))
    queue = standard.create_queue(QueueName="jobs-1")["QueueUrl"]
    standard.create_queue(QueueName="others")
    standard.send_message(QueueUrl=queue, MessageBody="ü~ /+")
    sender.send_message(QueueUrl=queue, MessageBody="b")
    assert len(standard.receive_message(QueueUrl=queue, MaxNumberOfMessages=10)["Messages"]) == 2
    for call in (
        lambda: sender.receive_message(QueueUrl=queue),
        lambda: sender.send_message(QueueUrl="others", MessageBody="a"),
        lambda: sender.create_queue(QueueName="others-2"),
        lambda: standard.delete_queue(QueueUrl=queue),
        lambda: standard.set_queue_attributes(QueueUrl=queue, Attributes={"DelaySeconds": "1"}),
    ):
        with pytest.raises(ClientError) as error:
            call()
        assert code(error) == "AccessDenied"
    assert len(admin.list_queues()["QueueUrls"]) == 2
    assert "QueueUrls" not in sender.list_queues()
    admin.set_queue_attributes(QueueUrl=queue, Attributes={"VisibilityTimeout": "1"})


def test_the_policy_of_a_queue_allows_and_denies(served, keys):
    admin, standard, sender = (client(served, keys[1][name]) for name in ("admin", "standard", "sender"))
    queue = admin.create_queue(QueueName="shared")["QueueUrl"]

    def is_denied(call, *arguments, **values):
        try:
            call(*arguments, QueueUrl=queue, **values)
        except ClientError as error:
            return error.response["Error"]["Code"] == "AccessDenied"
        return False

    sends = {"Entries": [{"Id": "a", "MessageBody": "a"}]}
    assert is_denied(sender.send_message_batch, **sends)
    allowed = {"AWSAccountIds": [keys[1]["sender"][0]], "Actions": ["SendMessage"]}
    admin.add_permission(QueueUrl=queue, Label="one", **allowed)
    assert not is_denied(sender.send_message_batch, **sends)
    assert is_denied(sender.receive_message)
    assert is_denied(sender.get_queue_attributes, AttributeNames=["All"])
    admin.remove_permission(QueueUrl=queue, Label="one")
    assert is_denied(sender.send_message_batch, **sends)

    def statement(effect, **others):
        return {"Effect": effect, "Principal": "*", "Action": "sqs:*", "Resource": "*", **others}

    def set_policy(*statements):
        text = json.dumps({"Version": "2012-10-17", "Statement": statements})
        admin.set_queue_attributes(QueueUrl=queue, Attributes={"Policy": text})

    set_policy(statement("Allow"), statement("Deny", Principal={"AWS": keys[1]["standard"][0]}))
    assert is_denied(standard.send_message, MessageBody="a")
    assert not is_denied(sender.receive_message)
    condition = {"Condition": {"Bool": {"aws:SecureTransport": "false"}}}
    with pytest.raises(ClientError, match="needs the permission"):
        standard.create_queue(QueueName="jobs-9", Attributes={"Policy": '{"Statement": []}'})
    for wrong in (statement("Deny", **condition), statement("deny"), [statement("Deny")]):
        with pytest.raises(ClientError, match="denies") as error:
            set_policy(wrong)
        assert code(error) == "InvalidAttributeValue"
    set_policy(statement("Allow", **condition))
    assert is_denied(sender.receive_message)
    assert not is_denied(standard.receive_message)


def test_a_key_reaches_no_other_queue_by_dead_letters(served, keys):
    admin, team = (client(served, keys[1][name]) for name in ("admin", "team"))
    secret, own = admin.create_queue(QueueName="secret"), team.create_queue(QueueName="team-dead")

    def dead_to(name):
        return {"RedrivePolicy": json.dumps({"deadLetterTargetArn": ARN + name, "maxReceiveCount": 1})}

    jobs = team.create_queue(QueueName="team-jobs", Attributes=dead_to("team-dead"))["QueueUrl"]
    for call in (
        lambda: team.set_queue_attributes(QueueUrl=jobs, Attributes=dead_to("secret")),
        lambda: team.set_queue_attributes(QueueUrl=jobs, Attributes=dead_to("missing")),
        lambda: team.create_queue(QueueName="team-2", Attributes=dead_to("secret")),
    ):
        with pytest.raises(ClientError) as error:
            call()
        assert code(error) == "AccessDenied"
    admin.set_queue_attributes(QueueUrl=secret["QueueUrl"], Attributes=dead_to("team-dead"))
    assert team.list_dead_letter_source_queues(QueueUrl=own["QueueUrl"])["queueUrls"] == [jobs]
    admin.set_queue_attributes(QueueUrl=jobs, Attributes=dead_to("secret"))
    team.set_queue_attributes(QueueUrl=jobs, Attributes=dead_to("secret"))  # it is so already


def test_move_tasks_are_listed_by_whom_permissions_or_the_policy_allow(served, keys):
    admin, team = (client(served, keys[1][name]) for name in ("admin", "team"))
    queue = admin.create_queue(QueueName="moves")["QueueUrl"]
    assert "Results" not in admin.list_message_move_tasks(SourceArn=f"{ARN}moves")
    with pytest.raises(ClientError) as error:
        team.list_message_move_tasks(SourceArn=f"{ARN}moves")
    assert code(error) == "AccessDenied"
    policy = {"Statement": [{**ALLOWS, "Action": "SQS:ListMessageMoveTasks"}]}
    admin.set_queue_attributes(QueueUrl=queue, Attributes={"Policy": json.dumps(policy)})
    assert "Results" not in team.list_message_move_tasks(SourceArn=f"{ARN}moves")


def test_what_a_key_may_not_do_with_a_name_is_told_whatever_the_name(served, keys):
    handle = base64.b64encode(json.dumps({"taskId": "a", "sourceArn": f"{ARN}\ud800"}).encode()).decode()
    with pytest.raises(ClientError) as error:
        client(served, keys[1]["team"]).cancel_message_move_task(TaskHandle=handle)
    assert code(error) == "AccessDenied"


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, True),
        ({"Principal": {"AWS": "arn:aws:iam::000000000000:root"}}, True),
        ({"Principal": {"AWS": ["111111111111", "AKIA1"]}}, True),
        ({"Principal": {"AWS": "arn:aws:iam::000000000000:user/AKIA1"}}, True),
        ({"Principal": {"AWS": "arn:aws:iam::000000000000:user/AKIA2"}}, None),
        ({"Principal": {"Service": "s3.amazonaws.com"}}, None),
        ({"Principal": {"Service": "s3.amazonaws.com"}, "Effect": "Deny"}, False),
        ({"Effect": "Deny"}, False),
        ({"Effect": ["Deny"]}, False),
        ({"Effect": "deny"}, False),
        ({"Effect": "Deny", "Principal": {"AWS": [5]}}, False),
        ({"Effect": "Deny", "Action": "SendMessage"}, False),
        ({"Effect": "Deny", "Action": ["sqs:ReceiveMessage", ["sqs:SendMessage"]]}, False),
        ({"Action": ["SQS:receivemessage", "SQS:SendMessage"]}, True),
        ({"Action": "sqs:Receive*"}, None),
        ({"Resource": "arn:aws:sqs:*:*:job*"}, True),
        ({"Resource": "arn:aws:sqs:us-east-1:000000000000:others"}, None),
        ({"NotAction": "a"}, None),
        ({"Action": []}, None),
        ({"Action": "*"}, True),
        ({"Action": "sqs:S?ndMessage"}, True),
        ({"Action": "sqs:[S]endMessage"}, None),
        ({"Action": "sqs:[S]endMessage", "Effect": "Deny"}, None),
        ({"Resource": "arn:aws:sqs:us-east-1:000000000000:job?"}, True),
        ({"Resource": "arn:aws:sqs:us-east-1:000000000000:[j]obs"}, None),
        ({"Resource": "arn:aws:sqs:*jobs"}, True),
        ({"Resource": "arn:aws:sqs:eu-west-1:000000000000:jobs"}, None),
        ({"Resource": "arn:aws:sqs:us-east-1:111111111111:jobs"}, None),
        ({"Resource": "jobs"}, None),
        ({"Resource": ["arn:aws:sqs:eu-west-1:111111111111:jobs"], "Effect": "Deny"}, False),
        ({"Resource": "arn:aws:sqs:us-east-1:000000000000:others", "Effect": "Deny"}, None),
        ({"Resource": "arn:aws:sqs:*:*:${aws:username}", "Effect": "Deny"}, False),
        ({"Resource": "*" + "*a" * 200, "Effect": "Deny"}, None),
        ({"Principal": {"AWS": ["arn:aws:iam::000000000000:role/x", "AKIA1"]}}, True),
        ({"Principal": {"AWS": ["arn:aws:iam::000000000000:role/x", "AKIA2"]}, "Effect": "Deny"}, False),
        ({"Principal": {"AWS": "AKIA2"}, "Effect": "Deny"}, None),
        ({"Principal": {"AWS": "AKIA*"}}, None),
        ({"Principal": {"AWS": "AKIA*"}, "Effect": "Deny"}, False),
        ({"Principal": {"AWS": "arn:aws:iam::*:root"}, "Effect": "Deny"}, False),
        ({"Principal": {"AWS": "arn:aws:iam::000000000000:user/a/b/AKIA1"}, "Effect": "Deny"}, False),
        ({"Principal": {"AWS": "arn:aws:iam::1:user/000000000000"}}, None),
        ({"Principal": {"AWS": []}, "Effect": "Deny"}, False),
        ({"NotPrincipal": {"AWS": "AKIA2"}, "Effect": "Deny"}, False),
    ],
)
def test_a_statement_allows_what_aws_says(changes, wanted):
    policy = json.dumps({"Statement": {**ALLOWS, **changes}})
    assert said(policy) is wanted


def said(policy):
    arn = "arn:aws:sqs:us-east-1:000000000000:jobs"
    return verdict(policy, action="SendMessageBatch", key_id="AKIA1", account="000000000000", arn=arn)


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        ({}, None),
        ({"Version": "2012-10-17", "Id": "x", "Statement": []}, None),
        ({"Statement": ["Deny", "Allow"]}, False),
        ({"Statement": [ALLOWS, {**ALLOWS, "Effect": "Deny", "Action": "sqs:ReceiveMessage"}]}, True),
        ({"Statement": [ALLOWS, {**ALLOWS, "Effect": "Deny", "Principal": {"AWS": "AKIA1"}}]}, False),
        ({"Statement": [{**ALLOWS, "Condition": {}}, ALLOWS]}, True),
        ({"statement": [{**ALLOWS, "Effect": "Deny"}]}, False),
        ({"Statement": ALLOWS, "statement": []}, False),
        ({"Statement": ALLOWS, "NotStatement": 1}, False),
    ],
)
def test_several_statements_allow_what_aws_says(policy, wanted):
    assert said(json.dumps(policy)) is wanted


def test_wrong_secrets_and_unknown_keys_are_refused(served, keys):
    key_id, secret = keys[1]["admin"]
    for pair, wanted in (
        ((key_id, secret[:-1] + "~"), "SignatureDoesNotMatch"),
        (("AKIAUNKNOWN", secret), "InvalidClientTokenId"),
        (keys[1]["other"], "InvalidClientTokenId"),
    ):
        with pytest.raises(ClientError) as error:
            client(served, pair).list_queues()
        assert (code(error), error.value.response["ResponseMetadata"]["HTTPStatusCode"]) == (wanted, 403)
    assert served.ask("GET", "/?Action=ListQueues").status == 403


def signed(served, pair, body, *, age=timedelta(0), headers=None, drop=()):
    """Headers of a signed request."""
    url = f"http://127.0.0.1:{served.gateway.port}/"
    request = AWSRequest(
        "POST",
        url,
        headers={
            "Content-Type": "application/x-amz-json-1.0",
            "X-Amz-Target": "AmazonSQS.ListQueues",
            **(headers or {}),
        },
        data=body,
    )
    auth = SigV4Auth(Credentials(*pair), "sqs", "us-east-1")
    request.context["timestamp"] = (datetime.now(UTC) - age).strftime("%Y%m%dT%H%M%SZ")
    auth._modify_request_before_signing(request)
    for name in drop:
        del request.headers[name]
    text = auth.canonical_request(request)
    auth._inject_signature_to_request(request, auth.signature(auth.string_to_sign(request, text), request))
    return dict(request.headers.items())


def test_what_was_signed_can_not_be_changed(served, keys):
    pair = keys[1]["admin"]

    def ask(headers, body=b"{}", path="/"):
        answer = served.ask("POST", path, raw=body, headers=headers)
        return answer.status, answer.headers.get("x-amzn-query-error", "").partition(";")[0]

    good = signed(served, pair, b"{}")
    assert ask(good) == (200, "")
    assert ask(good, b'{"MaxResults":1}') == (403, "SignatureDoesNotMatch")
    assert ask(good, path="/?a=b") == (403, "SignatureDoesNotMatch")
    assert ask({**good, "X-Amz-Target": "AmazonSQS.PurgeQueue"}) == (403, "SignatureDoesNotMatch")
    for age in (timedelta(minutes=16), timedelta(minutes=-16)):
        assert ask(signed(served, pair, b"{}", age=age)) == (403, "SignatureDoesNotMatch")
    assert ask(signed(served, pair, b"{}", age=timedelta(minutes=14))) == (200, "")
    unsigned_target = signed(served, pair, b"{}", drop=["X-Amz-Target"])
    assert ask({**unsigned_target, "X-Amz-Target": "AmazonSQS.ListQueues"}) == (400, "IncompleteSignature")
    whole = good["Authorization"]
    algorithm, *fields = whole.replace(",", "").split()
    assert ask({**good, "Authorization": f"{algorithm} {', '.join(reversed(fields))}"}) == (200, "")
    assert ask({**good, "Authorization": whole.upper()})[0] == 400
    assert ask({**good, "Authorization": whole.replace("us-east-1", "us-west-1")})[0] == 403
    for broken in (
        "AWS4-HMAC-SHA256 Credential=a",
        "Basic x",
        whole.replace("/sqs/", "/s3/"),
        whole.partition(", Signature=")[0],
        whole.replace("host;", ""),
        whole.replace("host;", f"host;{'a' * 2_000};"),
    ):
        assert ask({**good, "Authorization": broken}) == (400, "IncompleteSignature")


def test_a_signed_url_is_good_until_it_expires(served, keys):
    url = f"http://127.0.0.1:{served.gateway.port}/signed%20?Action=ListQueues&QueueNamePrefix=a%20~%2B"
    request = AWSRequest("GET", url)
    SigV4QueryAuth(Credentials(*keys[1]["admin"]), "sqs", "us-east-1", expires=60).add_auth(request)
    path = request.url.partition(str(served.gateway.port))[2]
    assert served.ask("GET", path).status == 200
    assert served.ask("GET", path.replace("ListQueues", "PurgeQueue")).status == 403
    assert served.ask("GET", path.replace("Expires=60", "Expires=61")).status == 403
    assert served.ask("GET", path.replace("%2B", "+")).status == 403
    assert served.ask("GET", path.replace("Prefix=a%20~", "Prefix=a+%7e")).status == 200
    assert served.ask("GET", f"{path}&QueueNamePrefix=b").status == 403
    old = urllib.parse.parse_qs(urllib.parse.urlsplit(path).query)["X-Amz-Date"][0]
    assert served.ask("GET", path.replace(old, "20200101T000000Z")).status == 403
    for wrong in ("x", "000000001" + "9" * 9, "1" * 5_000):
        assert served.ask("GET", path.replace("Expires=60", f"Expires={wrong}")).status == 400


def test_rotation_keeps_the_old_secret_only_if_it_is_told_to():
    key, first = new_key("a", ["queue_admin"], [], operator_key=OPERATOR_KEY)
    both, second = rotated(key, keep_old=True, operator_key=OPERATOR_KEY)
    only, third = rotated(both, keep_old=False, operator_key=OPERATOR_KEY)
    assert len({first, second, third}) == 3
    assert (len(both.nonces), len(only.nonces), both.nonces[1]) == (2, 1, key.nonces[0])
    assert first not in json.dumps([*both.nonces, *both.digests])
    with pytest.raises(ConfigError, match="--aws-key"):
        rotated(key, keep_old=False)


def test_a_gateway_without_the_operators_key_refuses(keys, tmp_path):
    with running(storage_for(f"sqlite:///{tmp_path / 'queues.db'}"), keys[0]) as other:
        with pytest.raises(ClientError) as error:
            client(other, keys[1]["admin"]).list_queues()
        assert code(error) == "InvalidClientTokenId"
