"""What a gateway on Kafka knows of claims: of messages that were handed out, and of those that were not."""

from collections import namedtuple

from kmqpy.gateway.service import claims as module
from kmqpy.gateway.service.claims import Claims, Said

M = namedtuple("M", "id")


def heeded(claims, *ids, now_s=0.0):
    good, ended, claimed = claims.heed([M(one) for one in ids], now_s)
    return [one.id for one in good], [one.id for one in ended], [(one.id, left) for one, left in claimed]


def test_what_was_said_early_counts_once():
    claims = Claims()
    assert claims.note(Said(["a", "b"], None), 0.0) == ["a", "b"]
    assert claims.note(Said(["c"], 10.0), 0.0) == ["c"]
    assert claims.count_early(0.0) == 1
    assert heeded(claims, "a", "c", "d", now_s=4.0) == (["d"], ["a"], [("c", 6.0)])
    assert heeded(claims, "a", "b", "c", now_s=4.0) == (["a", "c"], ["b"], [])


def test_what_was_handed_out_is_known_and_nothing_is_early():
    claims = Claims()
    claims.hand_out(["a"], 30.0)
    assert claims.note(Said(["a", "b"], None), 0.0) == ["b"]
    assert heeded(claims, "a", "b") == (["a"], ["b"], [])


def test_the_later_end_counts_and_0_ends_a_claim():
    claims = Claims()
    claims.note(Said(["a", "b", "c"], 10.0), 0.0)
    claims.note(Said(["a"], 5.0), 0.0)
    claims.note(Said(["b"], 0.0), 1.0)
    claims.note(Said(["c"], None), 1.0)
    claims.note(Said(["c"], 0.0), 1.0)
    assert heeded(claims, "a", "b", "c", now_s=2.0) == (["b"], ["c"], [("a", 8.0)])
    assert heeded(claims, "a", "b", "c", now_s=2.0) == (["a", "b", "c"], [], [])


def test_claims_that_last_longer_are_not_made_shorter():
    claims = Claims()
    claims.hand_out(["a", "b"], 30.0)
    assert claims.shorter_than(["a", "b", "unknown"], 20.0) == ["unknown"]
    claims.note(Said(["a"], 50.0), 0.0)
    assert claims.shorter_than(["a", "b"], 40.0) == ["b"]
    claims.end()
    assert claims.shorter_than(["a", "b"], 1.0) == ["a", "b"]


def test_all_claims_end_and_acknowledgements_stay():
    claims = Claims()
    claims.note(Said(["a"], 10.0), 0.0)
    claims.note(Said(["b"], None), 0.0)
    claims.end()
    assert claims.count_early(0.0) == 0
    assert heeded(claims, "a", "b") == (["a"], ["b"], [])


def test_ids_are_bounded_and_the_latest_stay(monkeypatch):
    monkeypatch.setattr(module, "_MOST", 3)
    claims = Claims()
    claims.note(Said(list("abcde"), None), 0.0)
    assert heeded(claims, *"abcde") == (["a", "b"], ["c", "d", "e"], [])


def test_in_a_queue_that_collapses_nothing_counts_before_a_message_was_handed_out():
    claims = Claims()
    claims.note(Said(["a"], None), 0.0)  # heard of before the queue is opened
    claims.collapses = True
    assert claims.note(Said(["b"], None), 0.0) == ["b"]  # another gateway may know it
    assert claims.note(Said(["c"], 9.0), 0.0) == ["c"]
    assert heeded(claims, "a", "b", "c") == (["a", "b", "c"], [], [])
    assert claims.count_early(0.0) == 0
    claims.hand_out(["b"], 30.0)
    claims.note(Said(["b"], 60.0), 0.0)
    assert claims.shorter_than(["b"], 50.0) == []


def test_what_is_over_is_not_remembered_and_what_was_said_again_is_the_latest(monkeypatch):
    monkeypatch.setattr(module, "_MOST", 3)
    claims = Claims()
    claims.note(Said(["a"], None), 5.0)
    claims.note(Said(list("bcdef"), 0.0), 5.0)
    assert heeded(claims, "a", now_s=5.0) == ([], ["a"], [])
    claims.note(Said(["a"], None), 5.0)
    claims.note(Said(["b", "c"], 30.0), 5.0)
    claims.note(Said(["b"], 60.0), 5.0)
    assert claims.note(Said(["d"], None), 5.0) == ["d"]
    assert heeded(claims, *"abcd", now_s=5.0) == (["a"], ["d"], [("b", 60.0), ("c", 30.0)])
    claims.hand_out("abc", 30.0)
    claims.hand_out("a", 30.0)
    claims.note(Said(["b"], 60.0), 5.0)
    claims.hand_out("d", 30.0)
    assert claims.note(Said(list("abcd"), None), 5.0) == ["c"]


def test_what_another_gateway_has_handed_out_is_not_early():
    claims = Claims()
    claims.note(Said(["a", "b"], 30.0), 0.0)
    claims.forget_early(["b", "unknown"])
    assert claims.count_early(0.0) == 1
    assert heeded(claims, "a", "b") == (["b"], [], [("a", 30.0)])
