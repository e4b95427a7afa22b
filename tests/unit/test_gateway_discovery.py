"""What a gateway registers in ZooKeeper for EmoDB's clients."""

import json

import pytest

from kmqpy.gateway.discovery.ostrich import end_points


@pytest.mark.parametrize(
    ("host", "in_url"),
    [("h.example", "h.example"), ("10.0.0.1", "10.0.0.1"), ("2001:db8::1", "[2001:db8::1]")],
)
def test_urls_of_a_gateway(host, in_url):
    queue, dedup = end_points("prod", host, 8080, 8081, "https")
    assert (queue.folder, dedup.folder) == ("/ostrich/prod-emodb-queue-1", "/ostrich/prod-emodb-dedupq-1")
    data = json.loads(queue.data)
    assert (data["name"], data["id"]) == ("prod-emodb-queue-1", f"{host}:8080")
    assert json.loads(data["payload"]) == {
        "serviceUrl": f"https://{in_url}:8080/queue/1",
        "adminUrl": f"http://{in_url}:8081",
        "extensions": {"proxy": False},
    }
