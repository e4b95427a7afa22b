"""Unit tests have no Kafka."""

import pytest

from kmqpy.kafka.client.settings_mirror import SettingsMirror


@pytest.fixture(autouse=True)
def unknown_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients are told nothing of their queues, and nobody tells them."""
    monkeypatch.setattr(SettingsMirror, "find", lambda self, name: None)
    monkeypatch.setattr(SettingsMirror, "topic_ids", lambda self, name, anew=False: {})
    monkeypatch.setattr(SettingsMirror, "records", lambda self: None)
    monkeypatch.setattr(SettingsMirror, "write", lambda self, queues, certain=False: None)
    monkeypatch.setattr(SettingsMirror, "remove", lambda self, name: None)


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers ask their queue anew after 20 ms."""
    monkeypatch.setattr("kmqpy.worker.worker._RECEIVE_WAIT_S", 0.02)
