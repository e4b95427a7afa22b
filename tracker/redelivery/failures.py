"""Which messages of a partition could not be redelivered, how often, and which copies Kafka refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kmqpy.core.backoff import Backoff
from kmqpy.kafka.markers.log_cuts import offset_of
from kmqpy.kafka.settings import QueueSettings
from tracker.redelivery.redelivery_plan import Copy, Refusal

_RETRY_PAUSE = Backoff(0.4, 2, 30, jitter=0)
"""A message that failed is due again after this pause: 0.4 s, doubled by each of its failures, up to 30 s."""
_MAX_REFUSED_SHOWN = 10
"""refused() names at most this many messages, and only counts the others."""


class Failures:
    """Remembers the messages that are in flight still, by their numbers. Any thread may call refused()."""

    def __init__(self) -> None:
        self._tries: dict[int, int] = {}
        self._refusals: dict[int, Refusal] = {}

    def refusal(self, offset: int) -> Refusal | None:
        """How Kafka has refused copies of a message; None if it has not."""
        return self._refusals.get(offset)

    def note(self, offset: int) -> float:
        """Count a failure of a message; returns the seconds until it is due again."""
        tries = self._tries[offset] = self._tries.get(offset, 0) + 1
        return _RETRY_PAUSE.delay(tries)

    def note_refusal(self, copy: Copy, queue: QueueSettings, topic: str, error: Exception) -> str:
        """Note that `topic` refuses a copy; returns a text about the refusal."""
        offset = copy.entry.offset
        times, _, by_lane = self._refusals.get(offset, Refusal(0, ""))
        if topic == queue.name:
            times += 1
        elif topic == queue.dead_letter_topic:
            times = max(0, times - 1)  # so that the queue topic is tried next: its limit may have been raised
        elif topic == queue.copies_topic:
            by_lane = True
        why = f"topic {topic} takes no copy of about {copy.size} bytes ({error})"
        self._refusals[offset] = refusal = Refusal(times, why, by_lane)
        return _text(offset, refusal)

    def refused(self) -> list[str]:
        """Texts about messages whose copies Kafka refuses: a few, and how many more."""
        refusals = sorted(self._refusals.copy().items())
        texts = [_text(offset, refusal) for offset, refusal in refusals[:_MAX_REFUSED_SHOWN]]
        if more := len(refusals) - len(texts):
            texts.append(f"{more} more messages can't be copied")
        return texts

    def forget_ended(self, in_flight: Callable[[int], bool]) -> None:
        """Forget messages that are not in flight any more."""
        self.forget([offset for offset in self._tries if not in_flight(offset)])

    def forget(self, offsets: Iterable[int]) -> None:
        """Forget these messages."""
        if not self._tries:
            return
        for offset in offsets:
            self._tries.pop(offset, None)
            self._refusals.pop(offset, None)


def _text(offset: int, refusal: Refusal) -> str:
    return f"offset {offset_of(offset)}: {refusal.why}"
