"""Where EmoDB's robust clients look for end points in ZooKeeper. Source: Ostrich 1.9.3. Pure: no I/O.

Each end point is an ephemeral znode in the folder of its service; clients read only its data.
"""

from __future__ import annotations

import json

from kmqpy.gateway.discovery.registration import Entry

_ROOT = "/ostrich"


def end_points(cluster: str, host: str, port: int, admin_port: int, scheme: str) -> list[Entry]:
    """The end points of a gateway, one for each service of EmoDB's queues.

    host     a name, or an address without brackets
    cluster  of EmoDB; services are named `<cluster>-emodb-queue-1`, without a cluster `emodb-queue-1`
    """
    prefix = f"{cluster}-" if cluster else ""
    address = f"{host}:{port}"  # also of IPv6: ids may have no brackets
    in_url = f"[{host}]" if ":" in host else host
    found = []
    for kind in ("queue", "dedupq"):
        service = f"{prefix}emodb-{kind}-1"
        payload = {
            "serviceUrl": f"{scheme}://{in_url}:{port}/{kind}/1",
            "adminUrl": f"http://{in_url}:{admin_port}",
            "extensions": {"proxy": False},
        }
        # The payload is text that holds JSON.
        data = {"name": service, "id": address, "payload": json.dumps(payload, separators=(",", ":"))}
        text = json.dumps(data, separators=(",", ":")).encode()
        found.append(Entry(f"{_ROOT}/{service}", address, text, shared=_ROOT))
    return found
