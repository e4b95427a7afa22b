"""Waiting in native code where threads are greenlets; without gevent, which need not be installed."""

import sys
import types

import pytest

from kmqpy.core import green


@pytest.fixture
def gevent(monkeypatch):
    patched = types.SimpleNamespace(is_module_patched=lambda name: name == "time")
    monkeypatch.setitem(sys.modules, "gevent.monkey", patched)
    monkeypatch.setattr(green, "_told", [])


@pytest.mark.usefixtures("gevent")
def test_under_gevent_native_code_never_waits():
    waits = []

    def look(wait_s):
        waits.append(wait_s)
        return ["came"] if len(waits) == 3 else []

    assert green.wait_for(look, 5) == ["came"]
    assert waits == [0.0, 0.0, 0.0]
    assert green.wait_for(lambda _: [], 0.02) == []


def test_threads_wait_in_native_code():
    assert green.wait_for(lambda wait_s: [wait_s], 5) == [5]


@pytest.mark.usefixtures("gevent")
def test_it_is_told_once(caplog):
    green.tell_once()
    green.tell_once()
    assert [one.getMessage().partition(":")[0] for one in caplog.records] == ["gevent"]
