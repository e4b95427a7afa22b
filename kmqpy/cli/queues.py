"""The commands `kmq queue create`, `list`, `describe`, `alter` and `delete`, and `kmq purge`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import click

from kmqpy.cli import stored
from kmqpy.cli.groups import Group
from kmqpy.cli.options import DURATION, Cli, connected_to_any, milliseconds, pairs, queue_argument
from kmqpy.cli.output import confirmed, many, print_json, print_table, print_text, span, warn
from kmqpy.core.settings import build
from kmqpy.kafka.admin.admin import Admin, QueueDetails
from kmqpy.kafka.admin.queue_alteration import ALTERABLE
from kmqpy.kafka.settings import MARKER_FORMATS, QueueSettings
from kmqpy.kafka.topics import QueueTopics
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
)
_SHARES = {"fair", "max_in_flight_per_group"}


def _setting_options(function: Any) -> Any:
    """Add the options for settings that `kmq queue create` and `kmq queue alter` have both."""
    for option in reversed(_SETTINGS):
        function = option(function)
    return function


_more_settings = click.option(
    "--set", "more", metavar="KEY=VALUE", multiple=True, help="Another setting; repeatable."
)


def _changes(
    max_redeliveries: int | str | None,
    markers: str | None,
    late_acks: bool | None,
    others: dict[str, Any],
    **durations: timedelta | None,
) -> dict[str, int | str | bool]:
    """Return the settings that were given as options, by their names; durations in ms."""
    changes: dict[str, int | str | bool] = {
        f"{key}_ms": milliseconds(value) for key, value in durations.items() if value is not None
    }
    changes |= {key: value for key, value in others.items() if value is not None}
    if markers is not None:
        changes["markers"] = markers
    if late_acks is not None:
        changes["late_acks"] = late_acks
    if max_redeliveries is not None:
        changes["max_redeliveries"] = max_redeliveries
    return changes


def _refuse_shares(changes: Mapping[str, Any]) -> None:
    if _SHARES & changes.keys():
        raise click.UsageError("--fair and --max-in-flight-per-group are for queues of --queue-url")


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
@_setting_options
@click.option("--markers-topic", help="[QUEUE__markers]")
@click.option("--dead-letter-topic", help="[QUEUE__undelivered]")
@click.option("--consumer-group", help="[kmq-QUEUE]")
@click.option("--redelivery-count-header", help="[kmq-redelivery-count]")
@click.option("--collapse", is_flag=True, help="Of equal messages that wait, hand one out; for good.")
@_more_settings
@connected_to_any
def create(
    cli: Cli,
    queue: str | None,
    partitions: int | None,
    replication: int | None,
    retention: timedelta | None,
    max_redeliveries: int | str | None,
    lease: timedelta | None,
    max_delay: timedelta | None,
    max_lease: timedelta | None,
    markers: str | None,
    late_acks: bool | None,
    collapse: bool,
    more: tuple[str, ...],
    retry_lane: bool | None,
    priorities: int | None,
    fair: bool | None,
    max_in_flight_per_group: int | str | None,
    **names: str | None,
) -> None:
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
    lanes = {"retry_lane": retry_lane, "priorities": priorities}
    others = {"fair": fair, "max_in_flight_per_group": max_in_flight_per_group, **lanes}
    changes = _changes(
        max_redeliveries, markers, late_acks, others, lease=lease, max_delay=max_delay, max_lease=max_lease
    )
    if collapse:
        changes["collapse"] = True
    if cli.url is not None:
        of_topics = {"partitions": partitions, "replication": replication, "retention": retention}
        cli.kafka_only(**of_topics, markers=markers, late_acks=late_acks, **lanes, **names)
        stored.create(cli.url, name, {**changes, **dict(pairs(more, "--set"))}, as_json=cli.json)
        return
    _refuse_shares(changes)
    given = {key: value for key, value in names.items() if value}
    settings = build(QueueSettings, {"name": name}, dict(pairs(more, "--set")), changes, given)
    with cli.admin() as admin:
        there = " exists already" if _exists(admin, cli, name) else ""
        topics = admin.create_queue(
            settings if changes or given else name,
            partitions=partitions,
            replication=replication,
            retention=retention,
        )
        made = admin.settings(name) if cli.has_registry else settings.unregistered()
    if cli.json:
        print_json(_created(made, topics))
    else:
        print_text(
            f"queue {name}{there}: {many(topics.partitions, 'partition')}, "
            f"{many(topics.queue.replication, 'replica')}"
        )


def _exists(admin: Admin, cli: Cli, name: str) -> bool:
    """True if the registry has the queue; False without ZooKeeper."""
    return cli.has_registry and any(one.settings.name == name for one in admin.list_queues())


def _created(settings: QueueSettings, topics: QueueTopics) -> dict[str, Any]:
    """Return the JSON object that `kmq queue create` prints."""
    return {
        **dataclasses.asdict(settings),
        "partitions": topics.partitions,
        "replication": topics.queue.replication,
    }


@queue.command(name="list")
@connected_to_any
def list_(cli: Cli) -> None:
    """List the registered queues.

    \b
    Example:
      kmq queue list -o json
    """
    if cli.url is not None:
        stored.list_queues(cli.url, as_json=cli.json)
        return
    with cli.admin() as admin:
        cli.check_root(admin)
        found = admin.list_queues()
    if cli.json:
        print_json(
            [
                {**dataclasses.asdict(one.settings), "partitions": one.partitions, "deleting": one.deleting}
                for one in found
            ]
        )
        return
    print_table(
        ["queue", "partitions", "lease", "max redeliveries", ""],
        [
            [
                one.settings.name,
                one.partitions,
                span(one.settings.lease_ms),
                "none" if one.settings.max_redeliveries is None else one.settings.max_redeliveries,
                "deleting" if one.deleting else "",
            ]
            for one in found
        ],
    )


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
        stored.describe(cli.url, name, as_json=cli.json)
        return
    with cli.admin() as admin:
        cli.check_root(admin)
        found = admin.describe_queue(name)
    if cli.json:
        print_json(_described(found))
        return
    for key, value in dataclasses.asdict(found.settings).items():
        if isinstance(value, tuple):
            value = ",".join(value) or None
        shown = "none" if value is None else span(value) if key.endswith("_ms") else value
        print_text(f"{key.removesuffix('_ms'):<26}{shown}")
    print_text(f"{'registered':<26}{'deleting' if found.deleting else 'yes' if found.registered else 'no'}")
    print_text()
    print_table(
        ["topic", "partitions", "replicas", "id"],
        [
            [
                topic.name,
                topic.partitions,
                topic.replication,
                topic.topic_id,
            ]
            for topic in found.topics
        ],
    )
    for topic in found.topics:
        print_text()
        print_text(topic.name)
        for key, value in _shown_config(topic.config).items():
            print_text(f"  {key:<32}{value}")
    print_text()
    print_table(
        ["partition", "tracker", "stored offset"],
        [[p, found.owners.get(p), found.offsets.get(p)] for p in range(found.partitions)],
    )


_SHOWN_CONFIG = (
    "retention.ms",
    "retention.bytes",
    "cleanup.policy",
    "message.timestamp.type",
    "max.message.bytes",
    "min.insync.replicas",
    "unclean.leader.election.enable",
)
"""The settings of topics that `kmq queue describe` shows."""


def _shown_config(config: dict[str, str]) -> dict[str, str]:
    return {key: config[key] for key in _SHOWN_CONFIG if key in config}


def _described(found: QueueDetails) -> dict[str, Any]:
    """Return the JSON object that `kmq queue describe` prints."""
    return {
        "queue": found.settings.name,
        "registered": found.registered,
        "deleting": found.deleting,
        "partitions": found.partitions,
        "settings": dataclasses.asdict(found.settings),
        "topics": [
            {**dataclasses.asdict(topic), "config": _shown_config(topic.config)} for topic in found.topics
        ],
        "trackers": [
            {"partition": p, "owner": found.owners.get(p), "stored_offset": found.offsets.get(p)}
            for p in range(found.partitions)
        ],
    }


@queue.command()
@queue_argument
@click.option("--partitions", type=int, help="Add partitions up to this number; fewer is not possible.")
@_setting_options
@_more_settings
@connected_to_any
def alter(
    cli: Cli,
    queue: str | None,
    partitions: int | None,
    retention: timedelta | None,
    max_redeliveries: int | str | None,
    lease: timedelta | None,
    max_delay: timedelta | None,
    max_lease: timedelta | None,
    markers: str | None,
    late_acks: bool | None,
    more: tuple[str, ...],
    retry_lane: bool | None,
    priorities: int | None,
    fair: bool | None,
    max_in_flight_per_group: int | str | None,
) -> None:
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
    lanes = {"retry_lane": retry_lane, "priorities": priorities}
    others = {"fair": fair, "max_in_flight_per_group": max_in_flight_per_group, **lanes}
    changes = _changes(
        max_redeliveries,
        markers,
        late_acks,
        others,
        lease=lease,
        max_delay=max_delay,
        max_lease=max_lease,
    )
    if not changes and not more and partitions is None and retention is None:
        raise click.UsageError("name what is to be changed; see kmq queue alter --help")
    name = cli.named_queue(queue)
    if cli.url is not None:
        of_topics = {"partitions": partitions, "retention": retention}
        cli.kafka_only(**of_topics, markers=markers, late_acks=late_acks, **lanes)
        stored.alter(cli.url, name, {**changes, **dict(pairs(more, "--set"))}, as_json=cli.json)
        return
    _refuse_shares(changes)
    set_too = dict(pairs(more, "--set"))
    refuse_unalterable(set_too, ALTERABLE)
    with cli.admin() as admin:
        cli.check_root(admin)
        settings = admin.alter_queue(
            name, partitions=partitions, retention=retention, **{**set_too, **changes}
        )
        if {"retry_lane", "priorities"} & {**set_too, **changes}.keys():
            if settings.draining_lanes:
                warn(f"waiting until these lanes are empty: {', '.join(settings.draining_lanes)}")
            settings = admin.remove_lanes(name)  # also what an earlier call has left
    if cli.json:
        print_json(dataclasses.asdict(settings))
    else:
        print_text(f"queue {name} changed")


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
    if cli.url is not None:
        cli.kafka_only(leftovers=leftovers)
        stored.delete(cli.url, name, yes=yes, if_empty=if_empty, as_json=cli.json)
        return
    with cli.admin() as admin:
        cli.check_root(admin)
        found = admin.deletion(name, leftovers=leftovers)
        for topic, count in found.topics.items():
            warn(f"to be deleted: topic {topic} with {_records(count)}")
        for topic, other in found.kept.items():
            warn(f"kept: topic {topic}, which queue {other} uses")
        what = f"{many(len(found.topics), 'topic')} left over from a queue" if leftovers else "queue"
        confirmed(f"Delete {what} {name}, with all messages and dead letters?", yes=yes)
        found = admin.delete_queue(name, timeout=timeout, if_empty=if_empty, leftovers=leftovers)
    if cli.json:
        print_json({"queue": name, "deleted": True, "topics": list(found.topics), "kept": list(found.kept)})
    else:
        print_text(f"{'topics of ' if leftovers else ''}queue {name} deleted")


def _records(count: int) -> str:
    return f"about {many(count, 'record')}" if count else "no records"


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
    if cli.url is not None:
        stored.purge(cli.url, name, yes=yes, as_json=cli.json)
        return
    with cli.admin() as admin:
        cli.check_root(admin)
        held = admin.stats(name)
        about = "" if held.exact else "up to "
        warn(f"to be deleted: {about}{many(held.depth, 'message')} waiting, {held.in_flight} in flight")
        confirmed(f"Delete every message of queue {name}?", yes=yes)
        count = admin.purge(name)
    if cli.json:
        print_json({"queue": name, "purged": count})
    else:
        print_text(f"queue {name}: {many(count, 'message')} deleted")
