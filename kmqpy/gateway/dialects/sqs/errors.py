"""The errors of SQS, by the names that its two protocols have for them. Pure: no I/O."""

from __future__ import annotations

from typing import Any, NamedTuple

from kmqpy.errors import KmqError

_OWN = "com.amazonaws.sqs"
_COMMON = "com.amazon.coral.service"


class Fault(NamedTuple):
    """A kind of error: its code in the query protocol, its shape in JSON, its status, its namespace."""

    code: str
    shape: str
    status: int = 400
    space: str = _OWN


class SqsError(KmqError):
    """An error that SQS's clients know."""

    def __init__(self, fault: Fault, message: str) -> None:
        # JSON in a value, such as a policy, may hold half of a surrogate pair, which no answer can.
        super().__init__(fault, message.encode(errors="replace").decode())
        self.fault = fault

    def __str__(self) -> str:
        return str(self.args[1])


def _service(code: str, status: int = 400, shape: str = "") -> Fault:
    return Fault(f"AWS.SimpleQueueService.{code}", shape or code, status)


def _common(code: str, shape: str = "", status: int = 400) -> Fault:
    """One that SQS's model does not have: all services of AWS share it."""
    return Fault(code, shape or f"{code}Exception", status, _COMMON)


BATCH_IDS_NOT_DISTINCT = _service("BatchEntryIdsNotDistinct")
BATCH_TOO_LONG = _service("BatchRequestTooLong")
EMPTY_BATCH = _service("EmptyBatchRequest")
EMPTY_VALUE = _common("EmptyValue")
INVALID_BATCH_ID = _service("InvalidBatchEntryId")
NO_SUCH_QUEUE = _service("NonExistentQueue", shape="QueueDoesNotExist")
PURGE_IN_PROGRESS = _service("PurgeQueueInProgress", 403)
DELETED_RECENTLY = _service("QueueDeletedRecently")
TOO_MANY_ENTRIES = _service("TooManyEntriesInBatchRequest")
UNSUPPORTED = _service("UnsupportedOperation")

ACCESS_DENIED = _common("AccessDenied", status=403)
INCOMPLETE_SIGNATURE = _common("IncompleteSignature")
INVALID_ACTION = _common("InvalidAction", "UnknownOperationException")
INVALID_ADDRESS = Fault("InvalidAddress", "InvalidAddress", 404)
INVALID_ATTRIBUTE_NAME = Fault("InvalidAttributeName", "InvalidAttributeName")
INVALID_ATTRIBUTE_VALUE = Fault("InvalidAttributeValue", "InvalidAttributeValue")
INVALID_CONTENTS = Fault("InvalidMessageContents", "InvalidMessageContents")
INVALID_HANDLE = Fault("ReceiptHandleIsInvalid", "ReceiptHandleIsInvalid", 404)
INVALID_TOKEN = _common("InvalidClientTokenId", "UnrecognizedClientException", 403)
INVALID_VALUE = _common("InvalidParameterValue")
MALFORMED = _common("MalformedInput", "SerializationException")
MISSING_TOKEN = _common("MissingAuthenticationToken", status=403)
MISSING_PARAMETER = _common("MissingParameter", "MissingRequiredParameterException")
OVER_LIMIT = Fault("OverLimit", "OverLimit", 403)
QUEUE_EXISTS = Fault("QueueAlreadyExists", "QueueNameExists")
SIGNATURE_MISMATCH = _common("SignatureDoesNotMatch", "InvalidSignatureException", 403)
RESOURCE_NOT_FOUND = Fault("ResourceNotFoundException", "ResourceNotFoundException", 404)
THROTTLED = Fault("RequestThrottled", "RequestThrottled", 403)
TOO_LARGE = _common("RequestEntityTooLarge", status=413)
UNKNOWN_OPERATION = _common("UnknownOperation", status=404)
UNAVAILABLE = _common("ServiceUnavailable", status=503)

NO_QUEUE = "The specified queue does not exist"


def missing(name: str) -> SqsError:
    """The error for a parameter that is required, and not there."""
    return SqsError(MISSING_PARAMETER, f"The request must contain the parameter {name}.")


def invalid(value: object, name: str, reason: str) -> SqsError:
    """The error for a parameter with a wrong value; the texts are SQS's."""
    return SqsError(INVALID_VALUE, f"Value {value} for parameter {name} is invalid. Reason: {reason}")


def no_such_queue() -> SqsError:
    """The error for a queue that does not exist."""
    return SqsError(NO_SUCH_QUEUE, f"{NO_QUEUE}.")


def raise_no_such_queue() -> Any:
    """What Hub.with_queue() calls for a queue that does not exist."""
    raise no_such_queue()
