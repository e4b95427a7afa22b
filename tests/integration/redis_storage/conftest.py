"""The servers that tests of the storage on Redis use."""

import pytest
from redis import Redis


@pytest.fixture(params=["redis", pytest.param("valkey", marks=pytest.mark.breadth)])
def url(request, database_url):
    return database_url(request.param)


@pytest.fixture
def redis_url(database_url):
    """Of one of them, for what does not depend on the server."""
    return database_url("redis")


@pytest.fixture
def admin(redis_url):
    with Redis.from_url(redis_url, client_name="admin") as client:
        yield client
