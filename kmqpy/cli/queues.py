"""The commands `kmq queue create`, `list`, `describe`, `alter` and `delete`, and `kmq purge`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import click

from kmqpy.cli.options import DURATION, Cli, Group, connected_to_any, milliseconds, pairs, queue_argument
from kmqpy.cli.output import confirmed, many, print_json, print_sizes, print_table, print_text, span, warn
from kmqpy.core.settings import build
from kmqpy.kafka.admin.queue_alteration import ALTERABLE
from kmqpy.kafka.settings import MARKER_FORMATS, QueueSettings
from kmqpy.queue.storage import refuse_unalterable


class _LimitType(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """A whole number, or `none`."""

    name = "n|none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if str(value) == "none":
            return "none"
        if not str(value).isdecimal():
            self.fail(f"{value!r} is neither a whole number nor none", param, ctx)
        return int(value)


_SETTINGS = (
    click.option(
        "--max-redeliveries", type=_LimitType(), help="Redeliveries before a message is dead-lettered."
    ),
    click.option("--lease", type=DURATION, help="Lease of a message where receive names none."),
    click.option("--max-delay", type=DURATION, help="Longest delay of a send."),
    click.option("--max-lease", type=DURATION, help="Longest lease or extension."),
    click.option("--retention", type=DURATION, help="How long Kafka keeps messages and markers."),
    click.option(
        "--markers",
        type=click.Choice(MARKER_FORMATS),
        help="jvm: where trackers of the JVM library serve the queue; else range, which is faster [range].",
    ),
    click.option(
        "--late-acks/--no-late-acks",
        default=None,
        help="Hand no copy out that is acknowledged before it is taken [no].",
    ),
    click.option(
        "--retry-lane/--no-retry-lane",
        default=None,
        help="Redelivered messages do not wait behind the others: they have a topic of their own [no].",
    ),
    click.option("--priorities", type=int, help="Priorities of messages, each with a topic of its own [1]."),
    click.option(
        "--fair/--no-fair", default=None, help="Prefer groups of which least is in flight; with --queue-url."
    ),
    click.option(
        "--max-in-flight-per-group",
        type=_LimitType(),
        help="Messages of a group that may be in flight; with --queue-url.",
    ),
    click.option("--set", "more", metavar="KEY=VALUE", multiple=True, help="Another setting; repeatable."),
)
_DURATIONS = ("lease", "max_delay", "max_lease")
_SHARES = ("fair", "max_in_flight_per_group")
_OF_ANY_STORAGE = {"max_redeliveries", "collapse", *_DURATIONS, *_SHARES}
_SETTING_NAMES = (
    "max_redeliveries",
    "collapse",
    "markers",
    "late_acks",
    "retry_lane",
    "priorities",
    *_SHARES,
)
_TOPIC_NAMES = ("markers_topic", "dead_letter_topic", "consumer_group", "redelivery_count_header")


def _setting_options(function: Any) -> Any:
    for option in reversed(_SETTINGS):
        function = option(function)
    return function


def _changes(cli: Cli, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings given as options, durations in ms; refuse those that the storage does not have."""
    cli.kafka_only(**{key: value for key, value in given.items() if key not in _OF_ANY_STORAGE})
    if cli.url is None and any(given[key] is not None for key in _SHARES):
        raise click.UsageError("--fair and --max-in-flight-per-group are for queues of --queue-url")
    durations = {f"{key}_ms": given[key] and milliseconds(given[key]) for key in _DURATIONS}
    found = {**durations, **{key: given.get(key) for key in _SETTING_NAMES}}
    return {key: value for key, value in found.items() if value is not None}


@click.group(cls=Group)
def queue() -> None:
    """Create, look at, change and delete queues.

    \b
    Example:
      kmq queue create jobs --partitions 4
      kmq queue list
    """


@queue.command()
@queue_argument
@click.option("--partitions", type=int, help="As many clients can receive at once [as in the topic, or 1].")
@click.option("--replication", type=int, help="Copies of each record [3, or as many as brokers].")
@click.option("--markers-topic", help="[QUEUE__markers]")
@click.option("--dead-letter-topic", help="[QUEUE__undelivered]")
@click.option("--consumer-group", help="[kmq-QUEUE]")
@click.option("--redelivery-count-header", help="[kmq-redelivery-count]")
@click.option(
    "--collapse", is_flag=True, default=None, help="Of equal messages that wait, hand one out; for good."
)
@_setting_options
@connected_to_any
def create(cli: Cli, queue: str | None, more: tuple[str, ...], **given: Any) -> None:
    """Create a queue.

    Creates the queue's topics, and its entry in the registry, by which trackers know it. Topics that exist
    are kept when they fit, unless another queue uses them. A second call changes nothing; to recreate missing
    topics of a queue, its name alone is enough. With --queue-url, a queue that exists is an error.

    \b
    Example:
      kmq queue create jobs --partitions 4 --max-redeliveries 5 --lease 1m
      kmq --queue-url sqlite:///jobs.db queue create jobs --set requeue_to=front
    """
    name = cli.named_queue(queue)
    changes, set_too = _changes(cli, given), dict(pairs(more, "--set"))
    if cli.url is not None:
        with cli.url.storage(for_create=True) as storage:
            storage.create(name, **{**cli.url.settings, **changes, **set_too})
            cli.tell(storage.describe(name).settings, f"queue {name}")
        return
    names = {key: given[key] for key in _TOPIC_NAMES if given[key]}
    settings = build(QueueSettings, {"name": name}, set_too, changes, names)
    with cli.admin(new_root=True) as admin:
        known = cli.has_registry and admin.is_registered(name)
        topics = admin.create_queue(
            settings if changes or set_too or names else name,
            partitions=given["partitions"],
            replication=given["replication"],
            retention=given["retention"],
        )
        made = admin.settings(name) if cli.has_registry else settings.unregistered()
    sizes = {"partitions": topics.partitions, "replication": topics.queue.replication}
    shown = f"{many(topics.partitions, 'partition')}, {many(topics.queue.replication, 'replica')}"
    there = " exists already" if known else ""
    cli.tell({**dataclasses.asdict(made), **sizes}, f"queue {name}{there}: {shown}")


@queue.command(name="list")
@connected_to_any
def list_(cli: Cli) -> None:
    """List the registered queues.

    \b
    Example:
      kmq queue list -o json
    """
    if cli.url is not None:
        with cli.url.storage() as storage:
            names = storage.list()
            if cli.json:
                print_json([storage.describe(name).settings for name in names])
            else:
                print_table(["queue"], [[name] for name in names])
        return
    with cli.admin() as admin:
        found = admin.list_queues()
    if cli.json:
        print_json(
            [
                {**dataclasses.asdict(one.settings), "partitions": one.partitions, "deleting": one.deleting}
                for one in found
            ]
        )
        return
    rows = []
    for one in found:
        limit, lease = one.settings.max_redeliveries, span(one.settings.lease_ms)
        limits = [lease, "none" if limit is None else limit]
        rows.append([one.settings.name, one.partitions, *limits, "deleting" if one.deleting else ""])
    print_table(["queue", "partitions", "lease", "max redeliveries", ""], rows)


@queue.command()
@queue_argument
@connected_to_any
def describe(cli: Cli, queue: str | None) -> None:
    """Show settings, topics and trackers of a queue.

    \b
    Example:
      kmq queue describe jobs
    """
    name = cli.named_queue(queue)
    if cli.url is not None:
        with cli.url.storage() as storage:
            held = storage.describe(name)
        if cli.json:
            print_json(dataclasses.asdict(held))
        else:
            _print_settings(held.settings)
            print_text()
            print_sizes(held)
        return
    with cli.admin() as admin:
        found = admin.describe_queue(name)
    settings = dataclasses.asdict(found.settings)
    topics = [{**dataclasses.asdict(one), "config": _shown_config(one.config)} for one in found.topics]
    trackers = [
        {"partition": p, "owner": found.owners.get(p), "stored_offset": found.offsets.get(p)}
        for p in range(found.partitions)
    ]
    if cli.json:
        about = {"registered": found.registered, "deleting": found.deleting, "partitions": found.partitions}
        print_json({"queue": name, **about, "settings": settings, "topics": topics, "trackers": trackers})
        return
    _print_settings(settings)
    print_text(f"{'registered':<26}{'deleting' if found.deleting else 'yes' if found.registered else 'no'}")
    print_text()
    print_table(
        ["topic", "partitions", "replicas", "id"],
        [[topic.name, topic.partitions, topic.replication, topic.topic_id] for topic in found.topics],
    )
    for topic in topics:
        print_text()
        print_text(topic["name"])
        for key, value in topic["config"].items():
            print_text(f"  {key:<32}{value}")
    print_text()
    print_table(["partition", "tracker", "stored offset"], [[*one.values()] for one in trackers])


def _print_settings(settings: Mapping[str, Any]) -> None:
    for key, value in settings.items():
        shown = ",".join(value) if isinstance(value, tuple) else value
        shown = "none" if value in (None, ()) else span(value) if key.endswith("_ms") else shown
        print_text(f"{key.removesuffix('_ms'):<26}{shown}")


def _shown_config(config: Mapping[str, str]) -> dict[str, str]:
    shown = ["retention.ms", "retention.bytes", "cleanup.policy", "message.timestamp.type"]
    shown += ["max.message.bytes", "min.insync.replicas", "unclean.leader.election.enable"]
    return {key: config[key] for key in shown if key in config}


@queue.command()
@queue_argument
@click.option("--partitions", type=int, help="Add partitions up to this number; fewer is not possible.")
@_setting_options
@connected_to_any
def alter(cli: Cli, queue: str | None, more: tuple[str, ...], **given: Any) -> None:
    """Change a queue while it is used.

    Clients take the new settings when they are made, trackers of Kafka's queues at once. Keys move to other
    partitions when some are added. A lane that is to go (--no-retry-lane, fewer --priorities) is removed once
    it is empty and nothing has come into it for 15 s; after an error a second call goes on.

    \b
    Example:
      kmq queue alter jobs --partitions 8 --max-redeliveries none
      kmq queue alter jobs --set retry_delays=1s,10s,1m
      kmq queue alter jobs --retry-lane --priorities 3
      kmq --queue-url sqlite:///jobs.db queue alter jobs --set retry_delays=
    """
    if not more and all(value is None for value in given.values()):
        raise click.UsageError("name what is to be changed; see kmq queue alter --help")
    name = cli.named_queue(queue)
    changes, set_too = _changes(cli, given), dict(pairs(more, "--set"))
    if cli.url is not None:
        with cli.url.storage() as storage:
            storage.alter(name, **{**changes, **set_too})
            cli.tell(storage.describe(name).settings, f"queue {name} changed")
        return
    refuse_unalterable(set_too, ALTERABLE)
    of_topics = {key: given[key] for key in ("partitions", "retention")}
    with cli.admin() as admin:
        settings = admin.alter_queue(name, **of_topics, **{**set_too, **changes})
        if {"retry_lane", "priorities"} & {**set_too, **changes}.keys():
            if settings.draining_lanes:
                warn(f"waiting until these lanes are empty: {', '.join(settings.draining_lanes)}")
            settings = admin.remove_lanes(name)  # also what an earlier call has left
    cli.tell(dataclasses.asdict(settings), f"queue {name} changed")


@queue.command()
@queue_argument
@click.option("--yes", is_flag=True, help="Don't ask; the topics are shown all the same.")
@click.option(
    "--timeout", type=DURATION, default="30s", show_default=True, help="How long trackers may take to let go."
)
@click.option("--if-empty", is_flag=True, help="Delete only a queue without messages and dead letters.")
@click.option("--leftovers", is_flag=True, help="Delete the topics of a queue that is not registered.")
@connected_to_any
def delete(
    cli: Cli, queue: str | None, timeout: timedelta, *, yes: bool, if_empty: bool, leftovers: bool
) -> None:
    """Delete a queue with all its messages and dead letters.

    Shows each topic and asks, then waits until trackers have let go of the queue. Topics that another queue
    uses as well are kept. After an error a second call goes on where this one ended.

    With --leftovers, deletes the topics of an unregistered QUEUE that no other queue uses.

    \b
    Example:
      kmq queue delete jobs
      kmq queue delete jobs --leftovers
    """
    name = cli.named_queue(queue)
    if if_empty and leftovers:
        raise click.UsageError("--if-empty is for queues that are registered, --leftovers for others")
    question = f"{name}, with all messages and dead letters?"
    done: dict[str, Any] = {"queue": name, "deleted": True}
    if cli.url is not None:
        cli.kafka_only(leftovers=leftovers)
        with cli.url.storage() as storage:
            held = storage.describe(name)
            count = held.ready + held.delayed + held.in_flight
            shown = f"{many(count, 'message')}, {many(held.dead, 'dead letter')}"
            if if_empty and (count or held.dead):
                raise click.UsageError(f"queue {name} is not empty: {shown}")
            warn(f"to be deleted: {shown}")
            confirmed(f"Delete queue {question}", yes=yes)
            storage.delete(name)
        cli.tell(done, f"queue {name} deleted")
        return
    with cli.admin() as admin:
        found = admin.deletion(name, leftovers=leftovers)
        for topic, count in found.topics.items():
            records = f"about {many(count, 'record')}" if count else "no records"
            warn(f"to be deleted: topic {topic} with {records}")
        for topic, other in found.kept.items():
            warn(f"kept: topic {topic}, which queue {other} uses")
        what = f"{many(len(found.topics), 'topic')} left over from a queue" if leftovers else "queue"
        confirmed(f"Delete {what} {question}", yes=yes)
        found = admin.delete_queue(name, timeout=timeout, if_empty=if_empty, leftovers=leftovers)
    cli.tell(
        {**done, "topics": list(found.topics), "kept": list(found.kept)},
        f"{'topics of ' if leftovers else ''}queue {name} deleted",
    )


@click.command()
@queue_argument
@click.option("--yes", is_flag=True, help="Don't ask; the count is shown all the same.")
@connected_to_any
def purge(cli: Cli, queue: str | None, *, yes: bool) -> None:
    """Delete every message of a queue, in flight or not. Dead letters stay (see kmq dlq purge).

    \b
    Example:
      kmq purge jobs --yes
    """
    name = cli.named_queue(queue)

    def ask(waiting: str, in_flight: int) -> None:
        warn(f"to be deleted: {waiting} waiting, {in_flight} in flight")
        confirmed(f"Delete every message of queue {name}?", yes=yes)

    if cli.url is not None:
        with cli.url.opened(name) as opened:
            ask(many(opened.size(), "message"), opened.in_flight())
            count = opened.purge()
    else:
        with cli.admin() as admin:
            held = admin.stats(name)
            ask(f"{'' if held.exact else 'up to '}{many(held.depth, 'message')}", held.in_flight)
            count = admin.purge(name)
    cli.tell({"queue": name, "purged": count}, f"queue {name}: {many(count, 'message')} deleted")
