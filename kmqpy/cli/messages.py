"""The commands `kmq send` and `kmq receive`."""

from __future__ import annotations

import math
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import click

from kmqpy.cli.options import DURATION, Cli, connected_to_any, milliseconds, pairs, queue_argument
from kmqpy.cli.output import (
    PartlyDone,
    as_object,
    check_stdout,
    drop_stdout,
    print_error,
    print_json,
    span,
    standard_input,
    warn,
)
from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.core.durations import MIN_LEASE_MS
from kmqpy.core.pieces import pieces
from kmqpy.errors import KmqError, MessageError
from kmqpy.kafka.kmq_client import KmqClient
from kmqpy.message import Message, OutgoingMessage
from kmqpy.queue import Queue

_MAX_READ = 256 * 1024
"""The most bytes of standard input that `kmq send` reads at once."""
_MAX_BATCH = 1_000
"""The most messages that `kmq send` sends, or `kmq receive` takes, in one batch; a further batch follows."""
_MAX_WAIT_S = 0.2
"""The longest wait of one receive(), in seconds; Ctrl-C takes effect when receive() returns."""
_MAX_JOIN_S = 15.0
"""`kmq receive` waits at most this time, in seconds, for partitions; then the time of --wait begins. The
consumer group may have to wait 10 s for a member that was killed."""
_MORE_S = 0.5
"""After its first messages `kmq receive` goes on for this time, in seconds; then it ends (without --follow)
as soon as a receive() returns nothing."""


@click.command()
@queue_argument
@click.argument("message", nargs=-1)
@click.option("--key", help="On Kafka, messages of one key go to one partition, in order.")
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="A header; repeatable.")
@click.option("--delay", type=DURATION, default="0s", help="How long until it can be received.")
@click.option("--partition", type=click.IntRange(min=0), help="Send to this partition; Kafka only.")
@click.option("--priority", type=click.IntRange(0, 9), help="0 to 9, the highest comes first.")
@click.option("--group", help="Its group, in whose order it comes with order=group; not on Kafka.")
@click.option("--dedup-id", help="Store it only if none was sent with this id lately; not on Kafka.")
@connected_to_any
@click.pass_context
def send(
    ctx: click.Context,
    /,
    cli: Cli,
    queue: str | None,
    message: tuple[str, ...],
    key: str | None,
    headers: tuple[str, ...],
    delay: timedelta,
    partition: int | None,
    priority: int | None,
    **not_on_kafka: Any,
) -> None:
    """Send messages: arguments, or lines of standard input.

    Prints their ids (on Kafka partition-offset) when they are confirmed. Lines that are too large are named,
    and the others sent (exit code 1). Where the topic allows less than 1 MiB, it may stop at one.

    \b
    Example:
      kmq send jobs "resize 17" --key user-1 --header source=web --delay 5s
      seq 1000 | kmq send jobs
    """
    name, message = cli.named_queue_and(queue, message)
    if not message:
        standard_input("give messages as arguments")
    given: dict[str, Any] = {
        "key": None if key is None else os.fsencode(key),
        "headers": [(name, os.fsencode(value)) for name, value in pairs(headers, "--header", "name=value")],
        "delay": delay,
        "priority": priority or 0,
    }
    with _sender(cli, name, given, partition, not_on_kafka) as send_many:
        sending = _Sending(cli, send_many)
        if message:
            sending.send([os.fsencode(one) for one in message])
        else:
            for batch in _lines():
                sending.send(batch)
    if sending.refused:
        ctx.exit(1 if sending.sent else 2)


SendMany = Callable[[Sequence[bytes]], list[str]]
"""Sends bodies and returns the ids of the messages."""


@contextmanager
def _sender(
    cli: Cli, name: str, given: dict[str, Any], partition: int | None, not_on_kafka: dict[str, Any]
) -> Iterator[SendMany]:
    """Yield a function that sends to the queue of this name, with the key, headers and delay in `given`."""
    more = {key: value for key, value in not_on_kafka.items() if value is not None}
    if cli.url is not None:
        cli.kafka_only(partition=partition is not None)
        with cli.url.opened(name) as queue:
            yield lambda bodies: queue.send_many([OutgoingMessage(one, **given, **more) for one in bodies])
        return
    for key in more:
        raise click.UsageError(f"--{key.replace('_', '-')}: queues on Kafka have none")
    settings = cli.queue(name)
    _check_span("--delay", given["delay"], settings.max_delay_ms)
    with KmqClient(settings, cli.connection) as producer:
        yield partial(producer.send_many, partition=partition, **given)


class _Sending:
    """Sends batches of messages, prints their ids, and names and counts those `refused` as too large."""

    def __init__(self, cli: Cli, send_many: SendMany) -> None:
        self._cli = cli
        self._send_many = send_many
        self._handled = 0
        self.sent = 0
        self.refused = 0

    def send(self, batch: list[bytes]) -> None:
        try:
            self._done(self._send(batch))
        except MessageError:  # no message of the batch was sent; otherwise Unfinished is raised
            for index, one in enumerate(batch):
                try:
                    self._done(self._send([one]))
                except MessageError as error:
                    self.refused += 1
                    print_error(f"message {self._handled + index + 1}: {error}")
        self._handled += len(batch)

    def _send(self, batch: list[bytes]) -> list[str]:
        """Send a batch; raises PartlyDone for an error other than MessageError after messages were sent."""
        try:
            return self._send_many(batch)
        except MessageError:
            raise
        except KmqError as error:
            if not self.sent:
                raise
            raise PartlyDone(f"{error} ({self.sent} messages before were sent)") from error

    def _done(self, ids: list[str]) -> None:
        self.sent += len(ids)
        try:
            for one in ids:
                place = {}
                if self._cli.url is None:  # the lane, unless it is the main one, stands before a colon
                    partition, _, offset = one.rpartition(":")[2].partition("-")
                    place = {"partition": int(partition), "offset": int(offset)}
                self._cli.tell({"id": one, **place}, one)
        except BrokenPipeError:  # the rest of the input must be sent all the same
            drop_stdout()


def _lines() -> Iterator[list[bytes]]:
    """Yield the lines of standard input as they arrive, in batches."""
    begun: list[bytes] = []  # pieces of the last line; joined once, because the line may be huge
    read: Any = standard_input("give messages as arguments").buffer.read1  # type: ignore[attr-defined]
    while chunk := read(_MAX_READ):
        first, *more = chunk.split(b"\n")
        begun.append(first)
        if more:
            lines = [b"".join(begun), *more[:-1]]
            begun = [more[-1]]
            yield from pieces(lines, _MAX_BATCH)
    if rest := b"".join(begun):
        yield [rest]


@click.command()
@queue_argument
@click.option("--max", "limit", type=click.IntRange(min=1), help="At most this many [1; --follow: no limit].")
@click.option(
    "--wait",
    type=DURATION,
    default="5s",
    show_default=True,
    help="How long to wait for a message, once the group has assigned partitions (within 15s).",
)
@click.option("--lease", type=DURATION, help="How long they are yours [the queue's lease].")
@click.option("--holder", help="A name that in-flight shows beside them; Kafka only [kmq-HOST-PID].")
@click.option("--ack", is_flag=True, help="Acknowledge each once it is printed.")
@click.option("--follow", is_flag=True, help="Go on until Ctrl-C.")
@connected_to_any
@click.pass_context
def receive(
    ctx: click.Context,
    cli: Cli,
    queue: str | None,
    limit: int | None,
    wait: timedelta,
    lease: timedelta | None,
    holder: str | None,
    *,
    ack: bool,
    follow: bool,
) -> None:
    """Take messages and print each as a line of JSON.

    They stay yours until the lease ends; then they are redelivered, unless acknowledged by their receipts
    (kmq ack), from any process. Prints nothing on stdout when there is none within --wait.

    \b
    Fields: receipt queue id key body headers attempts enqueued_ms first_enqueued_ms lease_until_ms; on
    Kafka partition and offset, too. What is not UTF-8 text is in key_base64, body_base64, headers_base64.

    \b
    Example:
      kmq receive jobs --max 10 --lease 1m
      kmq receive jobs --ack --follow | jq .body
    """
    check_stdout()  # or messages would be taken that nobody sees
    if lease is not None and milliseconds(lease) < MIN_LEASE_MS:
        raise click.BadParameter(f"must be at least {span(MIN_LEASE_MS)}", param_hint="--lease")
    count = 0
    left = limit if limit is not None else None if follow else 1
    until = math.inf
    join_until = SYSTEM_CLOCK.monotonic() + _MAX_JOIN_S
    with (
        _receiver(cli, cli.named_queue(queue), lease, holder) as (client, is_ready),
        _interruptible() as interrupted,
    ):
        while not interrupted and left != 0:
            if until == math.inf and (is_ready() or SYSTEM_CLOCK.monotonic() >= join_until):
                until = SYSTEM_CLOCK.monotonic() + wait.total_seconds()
            remaining = until - SYSTEM_CLOCK.monotonic()
            batch = client.receive(
                _MAX_BATCH if left is None else min(left, _MAX_BATCH),
                wait=_MAX_WAIT_S if follow else max(0.0, min(remaining, _MAX_WAIT_S)),
                lease=lease,
            )
            _print(client, batch, interrupted, ack=ack)
            count += len(batch)
            if batch:
                left = None if left is None else left - len(batch)
                until = min(until, SYSTEM_CLOCK.monotonic() + _MORE_S)
            elif remaining <= 0 and not follow:
                break
        client.flush()
    if interrupted:
        ctx.exit(interrupted[0])
    if not count:
        has_tracker = cli.ask_registry(lambda registry: bool(registry.trackers()), otherwise=True)
        hint = "" if has_tracker else "; no tracker runs, so nothing is redelivered: kmq tracker"
        warn(f"no message within {span(milliseconds(wait))}{hint}")


@contextmanager
def _receiver(
    cli: Cli, name: str, lease: timedelta | None, holder: str | None
) -> Iterator[tuple[Queue, Callable[[], bool]]]:
    """Yield the receiver of the queue, and a function that returns True once messages can come."""
    if cli.url is not None:
        cli.kafka_only(holder=holder)
        with cli.url.opened(name) as queue:
            _check_span("--lease", lease, round(queue.max_lease * 1000))
            yield queue, lambda: True
        return
    settings = cli.queue(name)
    _check_span("--lease", lease, settings.max_lease_ms)
    holder = holder or f"kmq-{socket.gethostname()}-{os.getpid()}"
    with KmqClient(settings, cli.connection, holder=holder) as client:
        yield client, lambda: bool(client.partitions)


def _check_span(option: str, value: timedelta | None, longest_ms: int) -> None:
    if value is not None and milliseconds(value) > longest_ms:
        raise click.BadParameter(f"longer than the queue allows, {span(longest_ms)}", param_hint=option)


def _print(client: Queue, batch: Sequence[Message], interrupted: list[int], *, ack: bool) -> None:
    """Print messages; with `ack`, acknowledge each that was printed.

    Gives messages back that could not be printed; their delivery does not count as an attempt.
    """
    printed = 0
    try:
        for message in batch:
            if interrupted:
                return
            print_json(as_object(message))  # flushes
            printed += 1
    finally:
        if printed < len(batch):
            client.nack(*batch[printed:], count=False)
        if ack and printed:
            client.ack(*batch[:printed])


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Yield a list that is empty until Ctrl-C or SIGTERM comes, and then holds the exit code.

    An exception in the middle of receive() would lose the messages just taken until their lease ends. A
    second signal has its usual effect: it ends the process at once.
    """
    came: list[int] = []

    def on_signal(number: int, _frame: object) -> None:
        came.append(128 + number)
        signal.signal(number, previous[number])

    previous: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[int(number)] = signal.signal(number, on_signal)
    except ValueError:  # not in the main thread
        previous.clear()
    try:
        yield came
    finally:
        for caught, handler in previous.items():
            signal.signal(caught, handler)
