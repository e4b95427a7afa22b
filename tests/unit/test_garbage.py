"""When Python's garbage collector is put off, and that it is no longer than a moment."""

import gc

import pytest

from kmqpy.core import garbage


@pytest.fixture(autouse=True)
def threshold():
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_a_collection_waits_for_many_messages_and_no_longer():
    for messages, young in ((499, 700), (500, 3_000), (5_000, 30_000), (5_000, 30_000), (10**9, 100_000)):
        garbage.put_off(messages)
        assert gc.get_threshold() == (young, 10, 10)
    for _ in range(2):
        garbage.resume()
        assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [0, 50_000])
def test_what_a_program_has_set_itself_stays(own):
    gc.set_threshold(own, 5, 5)
    garbage.put_off(5_000)
    assert gc.get_threshold() == (own, 5, 5)
    garbage.resume()
    assert gc.get_threshold() == (own, 5, 5)


def test_what_a_program_sets_meanwhile_counts():
    garbage.put_off(5_000)
    gc.set_threshold(1_000, 5, 5)
    garbage.resume()
    assert gc.get_threshold() == (1_000, 5, 5)
    garbage.put_off(5_000)
    garbage.resume()
    assert gc.get_threshold() == (1_000, 5, 5)


def test_a_program_without_collections_gets_none():
    gc.disable()
    try:
        with garbage.paused(5_000):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    with garbage.paused(5_000):
        assert not gc.isenabled()
    assert gc.isenabled()
