"""Requests as EmoDB's clients send them, and what each kind of answer has, byte by byte."""

import json

ILLEGAL = "java.lang.IllegalArgumentException"
SUCCESS = b'{"success":true}'
JSON = "Content-Type: application/json"
BAD_NAME = (
    "Queue name must be a lowercase ASCII string between 1 and 255 characters in length. Allowed punctuation "
    "characters are -.:@_ and the queue name may not start with a single underscore character. An example of "
    "a valid table name would be 'polloi:provision'."
)


def post(wire, path, body=None, *headers, kind=JSON):
    """POST a body with its length; `body` is JSON, or bytes as they are; None: none, and no type."""
    if body is None:
        return wire.ask("\r\n".join([f"POST {path} HTTP/1.1", "Content-Length: 0", *headers]))
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", f"Content-Length: {len(content)}", *([kind] if kind else []), *headers]
    return wire.ask("\r\n".join(head), content)


def get(wire, path, *headers, method="GET"):
    return wire.ask("\r\n".join([f"{method} {path} HTTP/1.1", *headers]))


def assert_answers(answer, body, status=200):
    """The body byte by byte, its type exactly, and neither an exception nor a redirection."""
    assert (answer.status, answer.body) == (status, body)
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["content-length"] == str(len(body))
    assert answer.exception is None
    assert "location" not in answer.headers


def assert_illegal(answer, text):
    assert (answer.status, answer.body.decode(), answer.exception) == (400, text, ILLEGAL)
    assert answer.headers["content-type"] == "text/plain"


def assert_no_json(answer):
    """Malformed, or the wrong kind of JSON."""
    assert (answer.status, answer.exception) == (400, None)
    assert answer.json.keys() == {"message"}
