"""A hub of the gateway over memory."""

import asyncio
from contextlib import asynccontextmanager

from kmqpy.gateway.service.hub import Hub, QueueName
from kmqpy.testing import memory_storage

JOBS = QueueName("jobs", settings={"max_redeliveries": None})


@asynccontextmanager
async def a_hub():
    with memory_storage() as storage:
        hub = Hub({"": storage})
        yield hub, storage
        await asyncio.to_thread(hub.close)
