"""The commands `kmq ack`, `nack`, `extend` and `dead-letter` for messages that `kmq receive` has taken.

Each command takes receipts, as arguments or on standard input. A receipt is a text that names a taken message
and its queue: `kmq receive` prints the receipt of each message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from typing import Any

import click

from kmqpy.cli.options import DURATION, Cli, connected_to_any
from kmqpy.cli.output import print_error, standard_input, warn
from kmqpy.errors import ConfigError, ReceiptError, TopicError
from kmqpy.kafka.kmq_client import KmqClient
from kmqpy.kafka.receipt import Receipt
from kmqpy.queue import Queue
from kmqpy.storages.receipts import queue_named_in

_FLUSH_TIMEOUT_S = 10.0
"""A command waits at most this time, in seconds, until the queue has confirmed what the command asked for;
then it fails."""
_RECEIPTS_ARGUMENT = click.argument("receipts", nargs=-1)


@click.command()
@_RECEIPTS_ARGUMENT
@connected_to_any
@click.pass_context
def ack(ctx: click.Context, cli: Cli, receipts: tuple[str, ...]) -> None:
    """Acknowledge messages: they are not redelivered.

    RECEIPTS are those that kmq receive printed. Without any, standard input is read: a receipt, or a line
    that kmq receive printed, on each line, or JSON as jq prints it. If a message was redelivered already,
    its copy is delivered all the same, unless the setting late_acks of the queue is on. kmq counts such
    messages, and those that are acknowledged already, too: the number it prints is that of valid receipts.

    \b
    Example:
      kmq ack 1.WyJqb2JzIiwi...
      kmq receive jobs --max 10 | kmq ack
    """
    _apply(ctx, cli, receipts, "acknowledged", lambda client, receipt: client.ack(receipt))


@click.command()
@_RECEIPTS_ARGUMENT
@click.option(
    "--delay", type=DURATION, help="Redeliver after this time [the queue's retry_delays, or at once]."
)
@click.option(
    "--reason",
    help="Why the message failed: kmq in-flight shows it, and the dead letter keeps it if the message "
    "becomes one.",
)
@click.option("--no-count", is_flag=True, help="This delivery is not an attempt.")
@connected_to_any
@click.pass_context
def nack(ctx: click.Context, /, cli: Cli, receipts: tuple[str, ...], *, no_count: bool, **given: Any) -> None:
    """Give messages back: they are redelivered.

    RECEIPTS come from kmq receive; without any, standard input is read, as by kmq ack.
    Nothing happens to messages that are acknowledged, redelivered (unless the setting late_acks of the
    queue is on) or dead letters already. kmq counts such messages, too: the number it prints is that of
    valid receipts.

    \b
    Example:
      kmq nack 1.WyJqb2JzIiwi... --delay 30s --reason "no disk space"
    """
    given["count"] = not no_count
    _apply(ctx, cli, receipts, "given back", lambda client, receipt: client.nack(receipt, **given))


@click.command()
@_RECEIPTS_ARGUMENT
@click.option(
    "--lease",
    type=DURATION,
    required=True,
    help="The lease ends this long from now; 0s gives back, like nack --no-count.",
)
@connected_to_any
@click.pass_context
def extend(ctx: click.Context, cli: Cli, receipts: tuple[str, ...], lease: timedelta) -> None:
    """Keep messages for longer (or shorter) than their lease.

    RECEIPTS come from kmq receive; without any, standard input is read, as by kmq ack.
    Nothing happens to messages that are acknowledged or redelivered already. On Kafka kmq counts them as
    extended, too, since it does not look whether they are leased. Other storages can tell: kmq names such
    receipts then, and its exit code is 1, or 2 if no lease was extended.

    \b
    Example:
      kmq extend 1.WyJqb2JzIiwi... --lease 5m
    """

    def act(client: Queue, receipt: str) -> None:
        if client.extend(receipt, lease=lease):
            raise ReceiptError(f"receipt: {receipt!r} has no lease any more that could be extended")

    _apply(ctx, cli, receipts, "extended", act)


@click.command(name="dead-letter")
@_RECEIPTS_ARGUMENT
@click.option("--reason", help="The dead letter's reason.")
@connected_to_any
@click.pass_context
def dead_letter(ctx: click.Context, cli: Cli, receipts: tuple[str, ...], reason: str | None) -> None:
    """Move messages to the dead letters.

    Without another try; on Kafka a tracker does it.
    RECEIPTS come from kmq receive; without any, standard input is read, as by kmq ack.
    Nothing happens to messages that are acknowledged, redelivered (unless the setting late_acks of the
    queue is on) or dead letters already. kmq counts such messages, too: the number it prints is that of
    valid receipts.

    \b
    Example:
      kmq dead-letter 1.WyJqb2JzIiwi... --reason "no such user"
    """
    _apply(ctx, cli, receipts, "rejected", lambda client, receipt: client.dead_letter(receipt, reason=reason))


def _apply(
    ctx: click.Context,
    cli: Cli,
    receipts: tuple[str, ...],
    done_word: str,
    act: Callable[[Queue, str], object],
) -> None:
    """Call `act` with each receipt and a client of its queue, then print how many messages were `done_word`.

    Prints an error for each receipt that can't be used. Exits with 1 if there was one, or with 2 if no
    receipt could be used. Without any receipt it says so on stderr and exits with 0, for pipes.
    """
    done = failed = 0
    clients: dict[str, Queue] = {}
    with ExitStack() as stack:
        for text in dict.fromkeys(receipts) or _from_stdin():
            try:
                name = _queue_named_by(cli, text)
                if name not in clients:
                    clients[name] = stack.enter_context(_finisher(cli, name))
                act(clients[name], text)
                done += 1
            except (ReceiptError, TopicError) as error:
                failed += 1
                print_error(error)
        for client in clients.values():
            client.flush(_FLUSH_TIMEOUT_S)
    if cli.json or done:
        cli.tell({"done": done, "failed": failed}, f"{done} {done_word}")
    if failed:
        ctx.exit(1 if done else 2)
    elif not done:
        warn("no receipts came on standard input")


def _queue_named_by(cli: Cli, receipt: str) -> str:
    if cli.url is None:
        return Receipt.parse(receipt).queue
    return cli.url.queue or queue_named_in(receipt)


def _finisher(cli: Cli, name: str) -> AbstractContextManager[Queue]:
    """Open the queue of this name; on Kafka a client that writes markers and receives nothing."""
    if cli.url is not None:
        return cli.url.opened(name)
    try:
        settings = cli.queue_with(name)
    except ConfigError as error:
        raise ReceiptError(f"receipt: {error}") from None
    return KmqClient(settings, cli.connection)


def _from_stdin() -> Iterable[str]:
    """Yield the receipts on standard input: of each line, or of JSON over several lines, as jq prints it."""
    begun: list[str] = []  # lines of JSON that has not ended
    for line in standard_input("give receipts as arguments").buffer:
        text = line.decode(errors="replace").rstrip()  # what is not text will be refused
        goes_on = begun and (not text or text[0] in " \t")
        if begun and not goes_on:
            if text[0] in "]}":
                yield from _receipts_in("\n".join([*begun, text]))
                begun = []
                continue
            yield from begun  # will be refused
            begun = []
        if goes_on or (text in ("{", "[") and not begun):
            begun.append(text)
        elif text.strip():
            yield from _receipts_in(text.strip())
    yield from begun


def _receipts_in(text: str) -> Iterable[str]:
    if text[0] in '[{"':
        try:
            found = json.loads(text)
            for one in found if isinstance(found, list) else [found]:
                yield one if isinstance(one, str) else str(one["receipt"])
        except (ValueError, KeyError, TypeError, RecursionError):
            yield text  # will be refused
    else:
        yield text
