"""storage_for("redis:", engine=…): a client or a pool of the application says where the server is."""

import pytest
import redis
import redis.asyncio

from kmqpy.errors import ConfigError
from kmqpy.queue import queue_for, storage_for


@pytest.fixture
def client(redis_url):
    with redis.Redis.from_url(redis_url, decode_responses=True) as made:
        yield made


@pytest.mark.parametrize("of", [lambda one: one, lambda one: one.connection_pool], ids=["client", "pool"])
def test_a_storage_connects_as_the_application_does(client, redis_url, queue_name, of):
    with storage_for(f"redis:?prefix={queue_name}", engine=of(client)) as storage:
        storage.create("q")
        queue = storage.open("q")
        queue.send("größer")
        [message] = queue.receive(wait=5)
        assert message.body == "größer".encode()
        queue.nack(message)
    with queue_for(f"{redis_url}?prefix={queue_name}&queue=q") as queue:
        assert queue.size() == 1
    assert client.ping(), "it stays open"


def test_clients_that_do_not_fit_are_refused(client):
    for url, wrong, text in (
        ("redis:", "text", "str is neither a redis.Redis"),
        ("redis:", redis.asyncio.Redis(), "is neither a redis.Redis"),
        ("redis://host", client, "write the url as redis:"),
    ):
        with pytest.raises(ConfigError, match=text):
            storage_for(url, engine=wrong)
