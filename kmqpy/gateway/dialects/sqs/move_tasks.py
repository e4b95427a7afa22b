"""SQS's message move tasks: dead letters go back to the queues from which they came, or to another one.

What a task is and how far it has come is kept with the queue that it empties (Sheet.tasks). That it is to be
run is a message of the queue KMQ.sqs-moves: a gateway takes it, extends its lease while it moves, and ends
it. If that gateway dies, the message comes again, to any gateway. A message is sent before it is removed, so
none is lost, and some may come twice.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import methodcaller
from typing import Any

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import KmqError
from kmqpy.gateway.dialects.sqs import shapes, values
from kmqpy.gateway.dialects.sqs.addresses import is_arn, queue_of_arn
from kmqpy.gateway.dialects.sqs.asked import Asked
from kmqpy.gateway.dialects.sqs.attributes import FIFO_SUFFIX, Sheet
from kmqpy.gateway.dialects.sqs.catalog import Catalog
from kmqpy.gateway.dialects.sqs.errors import (
    INVALID_VALUE,
    NO_SUCH_QUEUE,
    RESOURCE_NOT_FOUND,
    UNSUPPORTED,
    SqsError,
    invalid,
)
from kmqpy.gateway.dialects.sqs.messages import origin_of
from kmqpy.gateway.service.hub import Hub, QueueName
from kmqpy.gateway.service.polls import Polls
from kmqpy.gateway.service.served_queue import Taken
from kmqpy.message import OutgoingMessage

_log = logging.getLogger(__name__)

_JOBS = QueueName("KMQ.sqs-moves", settings={"max_redeliveries": None})
"""No queue of SQS's clients has a `.` in its name."""
_LEASE_S = 10.0
_EXTEND_EVERY_S = 3.0
_LOOK_EVERY_S = 2.0
_NOTE_EVERY_S = 0.5
_MOVE_LEASE_S = 30.0
_BATCH = 100
_MAX_RATE = 500
_KEPT = 10
_START_MS = 60_000
"""So long, in ms, a job waits for its task, which is kept after the job is sent."""
_AT_ONCE = 4
_ACTIVE = ("RUNNING", "CANCELLING")

Task = Mapping[str, Any]
"""id, status, to (the target's ARN, or empty), rate (messages per second, or 0), started_ms, moved, total."""


class MoveTasks:
    """Starts, cancels, lists and runs move tasks."""

    def __init__(self, hub: Hub, catalog: Catalog, polls: Polls) -> None:
        self._hub = hub
        self._catalog = catalog
        self._polls = polls
        self._look_now = asyncio.Event()
        self._stopping = False

    # --- actions ----------------------------------------------------------------------------------

    async def start(self, asked: Asked, given: shapes.StartMessageMoveTaskRequest) -> dict[str, Any]:
        """Start to empty a dead letter queue."""
        source, target, rate = (
            given.SourceArn or "",
            given.DestinationArn or "",
            given.MaxNumberOfMessagesPerSecond,
        )
        if rate is not None and not 1 <= rate <= _MAX_RATE:
            raise SqsError(
                INVALID_VALUE,
                "Value for parameter MaxNumberOfMessagesPerSecond is invalid. Reason: You must enter a "
                f"number that's between 1 and {_MAX_RATE}.",
            )
        name = await self._existing(asked, source, "SourceArn")
        if target and await self._existing(asked, target, "DestinationArn", "post") == name:
            raise SqsError(INVALID_VALUE, "Source queue arn and destination queue arn cannot be the same.")
        if target and name.endswith(FIFO_SUFFIX) != target.endswith(FIFO_SUFFIX):
            raise SqsError(
                INVALID_VALUE, "The source queue and destination queue must be of the same queue type."
            )
        if not await self._catalog.sources_of(name):
            raise SqsError(INVALID_VALUE, "Source queue must be configured as a Dead Letter Queue.")
        task = {
            "id": str(uuid.uuid4()),
            "status": "RUNNING",
            "to": target,
            "rate": rate or 0,
            "started_ms": SYSTEM_CLOCK.wall_ms(),
            "moved": 0,
            "total": (await self._catalog.describe(name)).ready,
        }

        def added(sheet: Sheet) -> Sheet:
            if any(one["status"] in _ACTIVE for one in sheet.tasks):
                raise SqsError(
                    INVALID_VALUE,
                    "There is already a task running. Only one active task is allowed for a source queue "
                    "arn at a given time.",
                )
            return replace(sheet, tasks=(task, *sheet.tasks)[:_KEPT])

        added(await self._catalog.read(name))
        # The job first: a task without one, if this gateway ends here, would be active for ever.
        job = json.dumps({"queue": name, "task": task["id"]}).encode()
        await self._hub.with_made(_JOBS, methodcaller("send", [job]))
        await self._catalog.change(name, added)
        self._look_now.set()
        return {"TaskHandle": _handle(task, source)}

    async def cancel(self, asked: Asked, given: shapes.CancelMessageMoveTaskRequest) -> dict[str, Any]:
        """Let a task end soon."""
        task_id, source = _parse_handle(given.TaskHandle or "")
        name = await self._existing(asked, source, "SourceArn")
        found = await self._change(name, task_id, {"status": "CANCELLING"}, must_run=True)
        return {"ApproximateNumberOfMessagesMoved": found["moved"]}

    async def list(self, asked: Asked, given: shapes.ListMessageMoveTasksRequest) -> dict[str, Any]:
        """The latest tasks of a queue, the last one first."""
        most = 1 if given.MaxResults is None else given.MaxResults
        if not 1 <= most <= _KEPT:
            raise invalid(most, "MaxResults", f"Must be between 1 and {_KEPT}, if provided.")
        source = given.SourceArn or ""
        name = await self._existing(asked, source, "SourceArn")
        sheet = await self._catalog.read(name)
        found = [_shown(one, source) for one in sheet.tasks[:most]]
        return {"Results": found} if found else {}

    async def _existing(self, asked: Asked, arn: str, parameter: str, needs: str = "") -> str:
        if not is_arn(arn):
            raise SqsError(
                INVALID_VALUE,
                f"You must use this format to specify the {parameter}: "
                "arn:<partition>:<service>:<region>:<account-id>:<resource-id>",
            )
        name = asked.about(queue_of_arn(arn, parameter), needs)
        if await self._catalog.find(name) is None:
            raise SqsError(
                RESOURCE_NOT_FOUND,
                f"The resource that you specified for the {parameter} parameter doesn't exist.",
            )
        return name

    async def _change(self, name: str, task_id: str, values: Task, *, must_run: bool = False) -> Task:
        """Change a task, unless it has ended; returns it as it is then."""

        def changed(sheet: Sheet) -> Sheet:
            if must_run:
                _check_runs(sheet, task_id)
            return replace(
                sheet,
                tasks=tuple(
                    {**one, **values} if one["id"] == task_id and one["status"] in _ACTIVE else one
                    for one in sheet.tasks
                ),
            )

        return _task(await self._catalog.change(name, changed), task_id) or {"status": "CANCELLED"}

    # --- running ----------------------------------------------------------------------------------

    def stop(self) -> None:
        """Let tasks end after their batch; other gateways go on with them."""
        self._stopping = True
        self._look_now.set()

    async def run(self) -> None:
        """Run the tasks that no gateway runs, until stop()."""
        if not self._hub.storage_of(_JOBS).capabilities.immediate:
            return  # Kafka keeps no notes, so there are none
        async with asyncio.TaskGroup() as tasks:
            places = asyncio.Semaphore(_AT_ONCE)
            while not self._stopping:
                self._look_now.clear()
                await places.acquire()
                job = await self._take()
                if job is not None:
                    tasks.create_task(self._run_job(job)).add_done_callback(lambda _: places.release())
                    continue
                places.release()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_EVERY_S):
                        await self._look_now.wait()

    async def _take(self) -> Taken | None:
        try:
            take = methodcaller("take", 1, _LEASE_S)
            found, _ = await self._hub.with_queue(_JOBS, take, missing=lambda: ([], ""))
        except KmqError:  # the storage is away; other moves say so
            return None
        except Exception:  # whatever it is, it may go, and tasks must go on
            _log.exception("move tasks wait")
            return None
        return found[0] if found else None

    async def _run_job(self, job: Taken) -> None:
        moving = asyncio.ensure_future(self._run_task(job))
        try:
            while not (await asyncio.wait([moving], timeout=_EXTEND_EVERY_S))[0]:
                await self._with_jobs(methodcaller("change", job.receipt, _LEASE_S))
            done = moving.result()
            await self._with_jobs(methodcaller("ack", [job.id]) if done else methodcaller("give_back", [job]))
        except Exception as error:  # the job comes again when its lease is over
            _log.warning("a move task has to wait", extra={"error": str(error)})
        finally:
            moving.cancel()

    async def _with_jobs(self, use: Any) -> None:
        await self._hub.with_queue(_JOBS, use, missing=lambda: None)

    async def _run_task(self, job: Taken) -> bool:
        """Move until nothing is left; returns False if this gateway must leave the rest."""
        try:
            told = json.loads(job.body)
            name, task_id = str(told["queue"]), str(told["task"])
        except (ValueError, KeyError, TypeError, RecursionError):  # of somebody else
            return True
        try:
            task = _task(await self._catalog.read(name), task_id)
            if task is None:
                if SYSTEM_CLOCK.wall_ms() - job.sent_ms < _START_MS:
                    raise KmqError(f"the task {task_id} of {name} is not kept yet")
                return True  # it never was
            ended = await self._move(name, task)
        except SqsError as error:
            if error.fault is NO_SUCH_QUEUE:  # the queue itself was deleted
                return True
            raise
        if ended is not None:
            await self._change(name, task_id, ended)
        return ended is not None

    async def _move(self, name: str, task: Task) -> Task | None:
        """Run a task; returns how it has ended, None: it has not."""
        moved, noted_s = int(task["moved"]), SYSTEM_CLOCK.monotonic()
        while task["status"] == "RUNNING":
            if self._stopping:
                return None
            taken = await self._next(name, min(task["rate"] or _BATCH, _BATCH))
            if not taken:
                return {"status": "COMPLETED", "moved": moved}
            begun_s = SYSTEM_CLOCK.monotonic()
            try:
                await self._hand_on(name, task, taken)
            except SqsError as error:
                await self._with(name, methodcaller("give_back", taken))
                return {"status": "FAILED", "moved": moved, "reason": error.fault.code}
            except BaseException:
                await self._with(name, methodcaller("give_back", taken))
                raise
            await self._with(name, methodcaller("ack", [one.id for one in taken]))
            moved += len(taken)
            if task["rate"]:
                await asyncio.sleep(
                    max(0.0, len(taken) / task["rate"] - (SYSTEM_CLOCK.monotonic() - begun_s))
                )
            if SYSTEM_CLOCK.monotonic() - noted_s > _NOTE_EVERY_S:
                task = await self._change(name, task["id"], {"moved": moved})
                noted_s = SYSTEM_CLOCK.monotonic()
        return {"status": "CANCELLED", "moved": moved}

    async def _next(self, name: str, most: int) -> Sequence[Taken]:
        found: tuple[Sequence[Taken], str] = await self._hub.with_queue(
            QueueName(name), methodcaller("take", most, _MOVE_LEASE_S), missing=lambda: ([], "")
        )
        return found[0]

    async def _hand_on(self, name: str, task: Task, taken: Sequence[Taken]) -> None:
        """Send messages to where they are to go; raises SqsError if nobody knows, or that queue is gone."""
        by_target: defaultdict[str, list[OutgoingMessage]] = defaultdict(list)
        for one in taken:
            origin = origin_of(one)
            arn = task["to"] or (origin.arn if origin is not None else "")
            if not arn:
                raise SqsError(_NO_SOURCE, "the message does not say from which queue it came")
            headers = [(key, value) for key, value in one.headers if key != values.MOVED]
            by_target[queue_of_arn(arn, "DestinationArn")].append(
                OutgoingMessage(
                    one.body, key=one.key, headers=headers, group=one.group, dedup_id=_again(task, one)
                )
            )
        if not task["to"]:  # clients of other dialects can write anything into the header
            for target in by_target:
                redrive = (await self._catalog.get(target)).redrive
                if redrive is None or queue_of_arn(redrive.arn, "RedrivePolicy") != name:
                    raise SqsError(_NO_SOURCE, f"{target} has another queue for its dead letters")
        for target, messages in by_target.items():
            sent = await self._with(target, methodcaller("send", messages))
            if sent is None:
                raise SqsError(NO_SUCH_QUEUE, "a queue to which messages are to go does not exist")
            self._polls.note(target, len(messages))

    async def _with(self, name: str, use: Any) -> Any:
        return await self._hub.with_queue(QueueName(name), use, missing=lambda: None)


_NO_SOURCE = INVALID_VALUE._replace(code="CouldNotDetermineMessageSource")


def _again(task: Task, one: Taken) -> str | None:
    """A dedup id for a message of a group: that of its first send may still count."""
    return None if one.group is None else f"{task['id']} {one.id}"


def _task(sheet: Sheet, task_id: str) -> Task | None:
    return next((one for one in sheet.tasks if one["id"] == task_id), None)


def _check_runs(sheet: Sheet, task_id: str) -> None:
    task = _task(sheet, task_id)
    if task is None:
        raise SqsError(RESOURCE_NOT_FOUND, "Task does not exist.")
    if task["status"] != "RUNNING":
        raise SqsError(UNSUPPORTED, "Only active tasks can be cancelled.")


def _shown(task: Task, source: str) -> dict[str, Any]:
    found = {
        "Status": task["status"],
        "SourceArn": source,
        "ApproximateNumberOfMessagesMoved": task["moved"],
        "ApproximateNumberOfMessagesToMove": task["total"],
        "StartedTimestamp": task["started_ms"],
    }
    if task["status"] == "RUNNING":
        found["TaskHandle"] = _handle(task, source)
    for name, key in (
        ("DestinationArn", "to"),
        ("MaxNumberOfMessagesPerSecond", "rate"),
        ("FailureReason", "reason"),
    ):
        if task.get(key):
            found[name] = task[key]
    return found


def _handle(task: Task, source: str) -> str:
    text = json.dumps({"taskId": task["id"], "sourceArn": source}, separators=(",", ":"))
    return base64.b64encode(text.encode()).decode()


def _parse_handle(text: str) -> tuple[str, str]:
    try:
        told = json.loads(base64.b64decode(text.encode("ascii"), validate=True))
        return str(told["taskId"]), str(told["sourceArn"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise SqsError(INVALID_VALUE, "Value for parameter TaskHandle is invalid.") from None
