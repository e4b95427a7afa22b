"""Cuts logs of a broker back, as a power cut does, or an election of a replica that was behind; damages them.

The topics keep their ids, and new records get offsets that others had before.
"""

import os
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kmqpy.dev import Cluster

_HEADER = struct.Struct(">qiibIhi")
"""The beginning of a batch: first offset, length of the rest, leader epoch, magic, CRC, attributes, and the
last offset, counted from the first."""
_LENGTH_FROM = 12
"""The length that a batch names is that of what follows these bytes."""
_CONTROL = 0x20


class Batch(NamedTuple):
    """A batch of records of a log: a log can be cut between batches only.

    control  True: it holds the record that ends a transaction
    """

    first: int
    last: int
    leader_epoch: int
    control: bool
    segment: Path
    begin: int
    end: int


class CutLog(NamedTuple):
    """What cut() did to a log: its records from offset `end` to before `former_end` are gone."""

    end: int
    former_end: int


Keep = int | Callable[[Sequence[Batch]], int]
"""Where to cut: an offset (records from there on go, and with each all of its batch); or a function of all
batches that says how many are kept."""


def share(of_all: float) -> Keep:
    """Keep this share of the batches, from 0 to 1."""
    return lambda batches: int(len(batches) * of_all)


def log_folder(cluster: Cluster, topic: str, partition: int = 0, broker: int = 1) -> Path:
    """The folder of a partition's log on a broker."""
    assert cluster.folder is not None
    return cluster.folder / f"broker-{broker}" / "data" / f"{topic}-{partition}"


def batches(folder: Path) -> list[Batch]:
    """Read all batches of a log, the oldest first. The broker may run: then the last ones may be missing."""
    found = []
    for segment in sorted(folder.glob("*.log")):
        data, at = segment.read_bytes(), 0
        while at + _HEADER.size <= len(data):
            first, length, epoch, _, _, attributes, delta = _HEADER.unpack_from(data, at)
            end = at + _LENGTH_FROM + length
            if end > len(data):
                break
            found.append(Batch(first, first + delta, epoch, bool(attributes & _CONTROL), segment, at, end))
            at = end
    return found


def cut(folder: Path, keep: Keep) -> CutLog:
    """Cut the log in this folder, of a broker that does not run; not below the log start that retention made.

    Files that are made from the log are removed: at its start the broker makes them anew.
    """
    found = batches(folder)
    former_end = found[-1].last + 1 if found else 0
    kept = keep(found) if callable(keep) else sum(batch.last < keep for batch in found)
    if kept >= len(found):
        return CutLog(former_end, former_end)
    gone = found[kept]
    for segment in folder.glob("*.log"):
        if segment.name > gone.segment.name:
            segment.unlink()
    os.truncate(gone.segment, gone.begin)
    for kind in ("index", "timeindex", "txnindex", "snapshot"):
        for file in folder.glob(f"*.{kind}"):
            file.unlink()
    return CutLog(found[kept - 1].last + 1 if kept else gone.first, former_end)


def damage(folder: Path, offset: int, at: int | None = None, *, zeros: bool = False) -> Callable[[], object]:
    """Flip a bit in the batch with this offset, at this byte or in the middle; returns what undoes it.

    With `zeros` the whole batch becomes zeros, as a page does that a disk has lost.
    """
    (batch,) = (one for one in batches(folder) if one.first <= offset <= one.last)
    data = bytearray(batch.segment.read_bytes())
    undo = partial(batch.segment.write_bytes, bytes(data))
    if zeros:
        data[batch.begin : batch.end] = bytes(batch.end - batch.begin)
    else:
        middle = (_HEADER.size + batch.end - batch.begin) // 2
        data[batch.begin + (middle if at is None else at)] ^= 0x10
    batch.segment.write_bytes(data)
    return undo


def cut_logs(
    cluster: Cluster, logs: Mapping[tuple[str, int], Keep], brokers: Sequence[int] = (1,)
) -> dict[tuple[str, int], CutLog]:
    """Kill brokers, cut their logs of these topics and partitions, and start them; returns when they answer.

    Says what was cut, of several brokers on the one with the longest log left. Clients that live through it
    may have written again by then.
    """
    found = _cut_dead(cluster, lambda _: logs, brokers)
    assert found.keys() == logs.keys(), f"no log of {logs.keys() - found.keys()}"
    return found


def cut_power(
    cluster: Cluster, brokers: Sequence[int], meanwhile: Callable[[], object] = lambda: None
) -> dict[tuple[str, int], CutLog]:
    """The same with all logs of these brokers: each is cut back to what its broker had flushed to its disk.

    The controllers' log is left: they flush each record. `meanwhile` is called while no broker runs.
    """
    return _cut_dead(cluster, lambda broker: flushed(cluster, broker), brokers, meanwhile)


def flushed(cluster: Cluster, broker: int) -> dict[tuple[str, int], int]:
    """Where the flushed part of each log ends, by the recovery-point checkpoint of a broker that is dead."""
    data = log_folder(cluster, "", 0, broker).parent
    there = {folder.name: 0 for folder in data.glob("*-*") if folder.name != "__cluster_metadata-0"}
    for line in (data / "recovery-point-offset-checkpoint").read_text().splitlines()[2:]:
        topic, partition, offset = line.split()
        there[f"{topic}-{partition}"] = int(offset)
    places = {name.rpartition("-"): end for name, end in there.items() if (data / name).is_dir()}
    return {(topic, int(number)): end for (topic, _, number), end in places.items() if number.isdigit()}


def _cut_dead(
    cluster: Cluster,
    logs_of: Callable[[int], Mapping[tuple[str, int], Keep]],
    brokers: Sequence[int],
    meanwhile: Callable[[], object] = lambda: None,
) -> dict[tuple[str, int], CutLog]:
    for broker in brokers:
        cluster.broker(broker).kill()
    found: dict[tuple[str, int], CutLog] = {}
    for broker in brokers:
        for (topic, partition), keep in logs_of(broker).items():
            folder = log_folder(cluster, topic, partition, broker)
            if not folder.exists():  # the broker has no replica
                continue
            done = cut(folder, keep)
            found[topic, partition] = max(done, found.get((topic, partition), done))
        # With this mark the broker would not look at what is in its logs.
        mark = log_folder(cluster, "", 0, broker).with_name(".kafka_cleanshutdown")
        mark.unlink(missing_ok=True)
    meanwhile()
    for broker in brokers:
        cluster.broker(broker).start(wait=0)
    for broker in brokers:
        cluster.broker(broker).wait_until_it_answers(180)  # all of them start at once
    return found
