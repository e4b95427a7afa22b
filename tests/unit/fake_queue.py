"""A queue in memory that notes what is done with it."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Self

from kmqpy.errors import Closed, NotSupported, ReceiptError
from kmqpy.message import Message, MessagesLike, OutgoingMessage, headers_from
from kmqpy.queue import Orphan
from kmqpy.queue_policy import QueuePolicy


class FakeQueue:
    """Speaks kmqpy.queue.Queue. Nothing comes again by itself, unless `redeliver`.

    `before_receive`, `before_extend`, `before_ack` are called first and may raise or block.
    """

    name = "fake"
    default_lease = 30.0
    max_lease = math.inf
    at_most_once = False
    in_groups = False
    max_in_flight: int | None = None
    delays_retries = False
    settings = QueuePolicy(name=name)

    def __init__(self, *bodies: bytes | str, redeliver: bool = False) -> None:
        self.changed = threading.Condition()
        self.ready: deque[Message] = deque()
        self.taken: dict[str, Message] = {}
        self.calls: list[tuple[str, str, dict[str, Any]]] = []
        self.largest_receive = 0
        self.most_taken = 0
        self.redeliver = redeliver
        self.closed = False
        self.lost: set[str] = set()
        """Receipts that extend() returns."""
        self.before_receive: Callable[[], None] = lambda: None
        self.before_extend: Callable[[], None] = lambda: None
        self.before_ack: Callable[[], None] = lambda: None
        self._count = 0
        self.send_many(bodies)

    def put(self, body: bytes | str, key: str | None = None, attempts: int = 1, headers: Any = None) -> str:
        with self.changed:
            self._count += 1
            number = self._count
            self.ready.append(
                Message(
                    queue=self.name,
                    id=f"m{number}",
                    body=body.encode() if isinstance(body, str) else body,
                    headers=headers_from(headers),
                    attempts=attempts,
                    enqueued_ms=0,
                    first_enqueued_ms=0,
                    lease_until_ms=0,
                    receipt=f"r{number}",
                    key=None if key is None else key.encode(),
                )
            )
            self.changed.notify_all()
            return f"m{number}"

    def of(self, op: str) -> list[str]:
        """The receipts that were given this operation."""
        with self.changed:
            return [receipt for name, receipt, _ in self.calls if name == op]

    def arguments(self, op: str) -> list[dict[str, Any]]:
        with self.changed:
            return [arguments for name, _, arguments in self.calls if name == op]

    def wait_for(self, condition: Callable[[], bool], timeout: float = 5) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout), self.calls

    def wait_until_finished(self, count: int) -> None:
        ends = {"ack", "nack", "dead_letter"}
        self.wait_for(lambda: sum(op in ends for op, _, _ in self.calls) >= count)

    # --- the protocol -------------------------------------------------------------------------------

    def send(self, body, *, key=None, headers=None, delay=0) -> str:
        return self.put(body, key, headers=headers)

    def send_many(self, bodies: Iterable[bytes | str], *, key=None, headers=None, delay=0) -> list[str]:
        return [
            self.put(body.body, body.key, headers=body.headers)
            if isinstance(body, OutgoingMessage)
            else self.put(body, key, headers=headers)
            for body in bodies
        ]

    def receive(self, max_messages: int = 100, *, wait: Any = 1.0, lease: Any = None) -> list[Message]:
        self.before_receive()
        with self.changed:
            if self.closed:
                raise Closed("closed")
            self.largest_receive = max(self.largest_receive, max_messages)
            self.changed.wait_for(lambda: self.ready, wait)
            until_ms = time.time_ns() // 1_000_000 + int(1000 * (30 if lease is None else lease))
            taken = [
                replace(self.ready.popleft(), lease_until_ms=until_ms)
                for _ in range(min(max_messages, len(self.ready)))
            ]
            self.taken.update((message.receipt, message) for message in taken)
            self.most_taken = max(self.most_taken, len(self.taken))
            self.changed.notify_all()
            return taken

    def ack(self, *messages: MessagesLike, confirmed: bool = False) -> None:
        self.before_ack()
        self._finish("ack", messages, {})

    def nack(self, *messages: MessagesLike, delay=0, count=True, reason=None, confirmed=False) -> None:
        finished = self._finish("nack", messages, {"delay": delay, "count": count, "reason": reason})
        if self.redeliver:
            with self.changed:
                self.ready.extend(replace(one, attempts=one.attempts + count) for one in finished)
                self.changed.notify_all()

    def extend(self, *messages: MessagesLike, lease: Any, confirmed: bool = False) -> list[str]:
        self.before_extend()
        self._note("extend", messages, {"lease": lease})
        return [one.receipt for one in messages if isinstance(one, Message) and one.receipt in self.lost]

    def dead_letter(self, *messages: MessagesLike, reason=None, confirmed=False) -> None:
        self._finish("dead_letter", messages, {"reason": reason})

    def peek(self, limit: int = 10) -> list[Message]:
        with self.changed:
            return list(self.ready)[:limit]

    def size(self) -> int:
        return len(self.ready)

    def in_flight(self) -> int:
        return len(self.taken)

    def orphans(self, older_than: Any) -> list[Orphan]:
        raise NotSupported("orphans")

    def purge(self) -> int:
        raise NotSupported("purge")

    def release_all(self) -> int:
        raise NotSupported("release_all")

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _note(self, op: str, messages: Iterable[Message | str], arguments: dict[str, Any]) -> None:
        with self.changed:
            if self.closed:
                raise Closed("closed")
            for message in messages:
                receipt = message if isinstance(message, str) else message.receipt
                self.calls.append((op, receipt, arguments))
            self.changed.notify_all()

    def _finish(self, op: str, messages: Iterable[Message | str], arguments: dict[str, Any]) -> list[Message]:
        with self.changed:
            receipts = [one if isinstance(one, str) else one.receipt for one in messages]
            for receipt in receipts:
                if receipt not in self.taken:
                    raise ReceiptError(f"{op} of {receipt}, which is not in flight")
            self._note(op, receipts, arguments)
            return [self.taken.pop(receipt) for receipt in receipts]
