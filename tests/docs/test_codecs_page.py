"""The function of docs/codecs.md that makes CloudEvents of messages."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cloudevents.core.bindings import kafka
from cloudevents.core.v1.event import CloudEvent

from kmqpy import storage_for
from tests.docs.pages import blocks

PAGE = (Path(__file__).parents[2] / "docs" / "codecs.md").read_text()
WHOLE = {"ce_id": "1", "ce_source": "/shop", "ce_specversion": "1.0", "ce_type": "t"}
STRUCTURED = '{"specversion": "1.0", "id": "2", "source": "/s", "type": "t", "time": "2026-01-01T00:00:00Z"}'


@pytest.fixture(scope="module")
def event_of():
    names: dict[str, Any] = {}
    (code,) = (block.code for block in blocks(PAGE) if "def event_of" in block.code)
    exec(code.partition("queue = ")[0], names)
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
    assert event_of(received(STRUCTURED, headers)).get_id() == "2"


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
