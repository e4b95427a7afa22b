"""Errors say that the name of a host can't be resolved; see also tests/integration/kmq/test_kmq_errors.py."""

import socket

import pytest
from confluent_kafka import KafkaError

from kmqpy.core.first_contact import first_contact_within
from kmqpy.errors import AccessDenied, Unavailable
from kmqpy.kafka import kafka_errors, librdkafka
from kmqpy.kafka.kmq_client import KmqClient
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.testing import ManualClock
from kmqpy.zookeeper.session import connect
from kmqpy.zookeeper.settings import ZooKeeperConnection

UNKNOWN = "a" * 64
"""Longer than a name can be, so that no name server is asked."""
REFUSED = KafkaError(KafkaError._AUTHENTICATION, "wrong password")
UNRESOLVED = KafkaError(KafkaError._RESOLVE, "h:9092/bootstrap: Failed to resolve 'h:9092': not known")


def test_of_the_issue_an_unknown_host_of_kafka_is_told():
    with first_contact_within(1.5), pytest.raises(Unavailable) as caught:
        KmqClient("q", KafkaConnection(bootstrap=f"{UNKNOWN}:9092"))
    assert f"transport failure; Failed to resolve '{UNKNOWN}:9092': " in str(caught.value)
    assert "); check the address" in str(caught.value)


def test_of_the_issue_an_unknown_host_of_zookeeper_is_told(monkeypatch):
    def unknown(*_):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with (
        pytest.raises(Unavailable, match=r"at h:2181 does not answer \(no host name can be resolved\)"),
        connect(ZooKeeperConnection(hosts="h"), timeout=0.5),
    ):
        pass


@pytest.fixture
def clock(monkeypatch):
    clock = ManualClock()
    monkeypatch.setattr(kafka_errors, "SYSTEM_CLOCK", clock)
    return clock


@pytest.fixture
def connection():
    return KafkaConnection(bootstrap="h:9092")


@pytest.fixture
def note(connection, monkeypatch):
    monkeypatch.setattr(kafka_errors, "_reported_errors", {})
    return librdkafka._settings(connection, {})["error_cb"]


def test_a_refusal_by_one_server_says_more_than_the_unknown_name_of_another(connection, note, clock):
    note(REFUSED)
    note(UNRESOLVED)
    timed_out = KafkaError(KafkaError._TIMED_OUT)
    assert isinstance(kafka_errors.translated(timed_out, "look", connection), AccessDenied)
    clock.advance(kafka_errors._REPORT_VALID_S)
    note(UNRESOLVED)
    assert "; Failed to resolve 'h:9092': not known);" in str(
        kafka_errors.translated(timed_out, "look", connection)
    )


def test_an_unknown_name_begins_no_series_of_refusals(connection, note, clock):
    note(UNRESOLVED)
    clock.advance(2 * kafka_errors._REFUSED_FOR_S)
    note(REFUSED)
    kafka_errors.check_access(connection, 0)
    clock.advance(2 * kafka_errors._REFUSED_FOR_S)
    note(REFUSED)
    with pytest.raises(AccessDenied):
        kafka_errors.check_access(connection, 0)
