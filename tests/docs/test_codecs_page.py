"""The codecs of docs/codecs.md, and its function that makes CloudEvents of messages."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cloudevents.core.bindings import kafka
from cloudevents.core.v1.event import CloudEvent
from pydantic import Field

from kmqpy import storage_for
from kmqpy.errors import MessageError, Unavailable
from kmqpy.queue.codecs import FunctionCodec
from kmqpy.queue.storage import encode_body
from tests.docs.pages import blocks

PAGE = (Path(__file__).parents[2] / "docs" / "codecs.md").read_text()
WHOLE = {"ce_id": "1", "ce_source": "/shop", "ce_specversion": "1.0", "ce_type": "t"}
STRUCTURED = {"specversion": "1.0", "id": "2", "source": "/s", "type": "t"}


def code_with(text, until):
    (code,) = (block.code for block in blocks(PAGE) if text in block.code)
    return code.partition(until)[0]


@pytest.fixture(scope="module")
def event_of():
    names: dict[str, Any] = {}
    exec(code_with("def event_of", until="queue = "), names)
    return names["event_of"]


@pytest.fixture
def received(tmp_path):
    with storage_for(f"sqlite:///{tmp_path}/events.db") as storage:
        storage.create("events")
        queue = storage.open("events")

        def received(body, headers, key=None):
            queue.send(body, key=key, headers=headers)
            (message,) = queue.receive()
            message.ack()
            return message

        yield received


@pytest.mark.parametrize("to_record", [kafka.to_binary_event, kafka.to_structured_event])
def test_an_event_arrives_as_it_was(received, event_of, to_record):
    attributes = {
        "id": "5 é%",
        "type": "order.placed",
        "source": "/shop/ü",
        "subject": "%C3%A9 é",
        "time": datetime(2026, 1, 1, 12, 0, 0, 5, tzinfo=UTC),
        "datacontenttype": "application/json",
        "partitionkey": "ann",
        "tenant": "7",
    }
    record = to_record(CloudEvent(attributes, data={"total": 9.5}))
    event = event_of(received(record.value, record.headers, record.key))
    assert event.get_attributes() == attributes | {"specversion": "1.0"}
    assert event.get_data() == {"total": 9.5}


def test_a_structured_event_may_have_the_headers_of_a_binary_one(received, event_of):
    headers = {**WHOLE, "content-type": "Application/CloudEvents+json; charset=UTF-8"}
    assert event_of(received(json.dumps(STRUCTURED), headers)).get_id() == "2"


def test_a_dead_letter_is_an_event_too(event_of):
    with storage_for("memory:") as storage:
        storage.create("events")
        queue = storage.open("events")
        queue.send(json.dumps(STRUCTURED), headers={"content-type": "application/cloudevents+json"})
        queue.dead_letter(queue.receive())
        (letter,) = queue.dead_letters.peek()
        storage.delete("events")
    assert event_of(letter).get_id() == "2"


def test_what_is_not_of_the_event_may_be_any_bytes(received, event_of):
    headers = [*((name.upper(), value) for name, value in WHOLE.items()), ("schema", b"\xff"), ("none", None)]
    assert event_of(received("{}", headers, key=b"\xff")).get_id() == "1"


@pytest.mark.parametrize("lacking", STRUCTURED)
def test_a_structured_event_that_lacks_something_is_refused(received, event_of, lacking):
    body = json.dumps({name: value for name, value in STRUCTURED.items() if name != lacking})
    message = received(body, {"content-type": "application/cloudevents+json"})
    with pytest.raises(KeyError):
        event_of(message)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        *({name: value for name, value in WHOLE.items() if name != lacking} for lacking in WHOLE),
        [*WHOLE.items(), ("ce_id", None)],
        {**WHOLE, "ce_id": ""},
        {**WHOLE, "ce_time": "yesterday"},
        {**WHOLE, "ce_source": b"\xff"},
        {**WHOLE, "content-type": "application/cloudevents-batch+json"},
    ],
)
def test_what_is_no_event_is_refused(received, event_of, headers):
    message = received("[]", headers)
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever the SDK raises; the page catches all
        event_of(message)


@pytest.fixture
def models():
    names: dict[str, Any] = {"Field": Field}
    code = code_with("pydantic", until="storage = ")
    exec(code.replace("id: int", 'id: int = Field(alias="orderId")'), names)
    return names


def test_a_model_with_an_alias_can_be_decoded(models):
    order = models["Order"](orderId=5, total=9.5)
    assert models["codec"].decode(models["codec"].encode(order)) == order


@pytest.mark.filterwarnings("ignore")
def test_what_is_no_such_model_is_not_sent(models):
    with pytest.raises(MessageError, match="can't encode dict"):
        encode_body(models["codec"], {"id": "no number"})


def no_answers(listening: socket.socket) -> None:
    with suppress(OSError):
        while True:
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                connection.recv(1)


@pytest.fixture(params=["nobody listens", "closes connections", "speaks no TLS"])
def registry(request: pytest.FixtureRequest) -> Iterator[str]:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        host, port = server.getsockname()
        if request.param == "nobody listens":
            server.close()
        threading.Thread(target=no_answers, args=[server], daemon=True).start()
        yield f"{'https' if 'TLS' in request.param else 'http'}://{host}:{port}"


def test_bodies_are_not_undecodable_while_the_registry_is_away(registry):
    names: dict[str, Any] = {"FunctionCodec": FunctionCodec}
    code = code_with("schema_registry", until="avro = storage")
    exec(code.replace('"url": "mock://"', f'"url": "{registry}", "max.retries": 0'), names)
    with pytest.raises(Unavailable):
        names["codec"].decode(b"\0\0\0\0\1\n")
    with pytest.raises(Unavailable):
        names["codec"].encode({"id": 5})
