"""Queue URLs and ARNs. Pure: no I/O."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote

from kmqpy.gateway.dialects.sqs.errors import invalid, no_such_queue

_ARN = re.compile(r"arn:[a-z-]+:sqs:[a-z0-9-]*:\d*:([^:]+)")


class Addresses(NamedTuple):
    """Makes the addresses of queues.

    base     scheme, host and port, as the client wrote them or as they were configured
    region   only appears in ARNs
    account  12 digits, which only appear in ARNs and URLs
    """

    base: str
    region: str
    account: str

    def url(self, queue: str) -> str:
        return f"{self.base}/{self.account}/{queue}"

    def arn(self, queue: str) -> str:
        return f"arn:aws:sqs:{self.region}:{self.account}:{queue}"


def queue_of_url(url: str) -> str:
    """The name in a queue's URL, of whatever host, or the bare name itself; raises SqsError."""
    path = url.partition("://")[2].partition("/")[2] if "://" in url else url
    name = queue_of_path(path) if "/" in path else path
    if not name:
        raise no_such_queue()
    return name


def queue_of_path(path: str) -> str | None:
    """The name in the path of a queue's URL; None for another path."""
    _, *names = path.strip("/").split("/")
    return unquote(names[0]) if len(names) == 1 else None


def is_arn(text: str) -> bool:
    return _ARN.fullmatch(text) is not None


def queue_of_arn(arn: str, parameter: str) -> str:
    """The name in an ARN; raises SqsError."""
    found = _ARN.fullmatch(arn)
    if found is None:
        raise invalid(arn, parameter, "it is no ARN of a queue.")
    return found[1]
