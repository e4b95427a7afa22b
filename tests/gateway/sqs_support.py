"""boto3 in front of a gateway; every answer is compared with AWS's own model."""

import json
from functools import cache

import boto3
from botocore.config import Config
from botocore.validate import ParamValidator
from gateway_support import Served

ACCOUNT = "000000000000"


@cache
def session():
    return boto3.session.Session("x", "y", region_name="us-east-1")


def client(served: Served):
    """SQS's client, which checks that answers are what the model says."""
    found = session().client(
        "sqs",
        endpoint_url=f"http://127.0.0.1:{served.gateway.port}",
        config=Config(retries={"total_max_attempts": 1}, read_timeout=60),
    )
    found.meta.events.register("after-call.sqs", check_answer)
    return found


def check_answer(http_response, parsed, model, **_):
    if http_response.status_code != 200:
        assert parsed["Error"]["Code"]
        return
    answer = json.loads(http_response.content)
    if model.output_shape is None:
        assert answer == {}
        return
    found = ParamValidator().validate(answer, model.output_shape).generate_report()
    # AWS leaves empty lists out, those that the model requires, too
    problems = [one for one in found.splitlines() if '"Successful"' not in one and '"Failed"' not in one]
    assert not problems, (problems, answer)
    assert [] not in answer.values() or "queueUrls" in answer, answer


def code(error):
    """The code of an error that boto3 has raised."""
    return error.value.response["Error"]["Code"]
