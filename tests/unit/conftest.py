"""Unit tests have no Kafka."""

import logging
from collections.abc import Iterator

import pytest

from kmqpy.kafka.settings_mirror import SettingsMirror
from kmqpy.testing import ManualClock


@pytest.fixture(autouse=True)
def unknown_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients are told nothing of their queues, and nobody tells them."""
    monkeypatch.setattr(SettingsMirror, "find", lambda self, name: None)
    monkeypatch.setattr(SettingsMirror, "topic_ids", lambda self, name, anew=False: {})
    monkeypatch.setattr(SettingsMirror, "records", lambda *_: None)
    monkeypatch.setattr(SettingsMirror, "write", lambda self, queues, certain=False: None)
    monkeypatch.setattr(SettingsMirror, "remove", lambda self, name: None)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def tracked():
    from tracked import Tracked

    return Tracked()


@pytest.fixture
def turning(tracked):
    from tracked import with_two_queues

    return with_two_queues(tracked)


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers ask their queue anew after 20 ms."""
    monkeypatch.setattr("kmqpy.worker.worker._RECEIVE_WAIT_S", 0.02)


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands see no addresses from outside, and their logging ends with the test."""
    for name in ("BOOTSTRAP", "ZOOKEEPER", "ROOT", "CONFIG", "QUEUE_URL"):
        monkeypatch.delenv(f"KMQ_{name}", raising=False)
    yield
    logging.getLogger("kmqpy").handlers.clear()


@pytest.fixture
def short_leases(monkeypatch):
    """Gives a queue a default lease of so many seconds."""

    def shorten(fake, lease_s):
        take = fake.receive
        monkeypatch.setattr(
            fake,
            "receive",
            lambda most, *, wait, lease: take(most, wait=wait, lease=lease or lease_s),
        )
        monkeypatch.setattr(fake, "default_lease", lease_s)
        return fake

    return shorten
