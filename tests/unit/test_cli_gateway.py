"""What `kmq gateway` and `kmq key` say, and refuse."""

import json

import pytest

from kmqpy.cli.app import run


@pytest.fixture
def kmq(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    for name in ("KMQ_AWS_KEY", "KMQ_QUEUE_URL", "KMQ_ZOOKEEPER", "KMQ_CONFIG"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments):
        code = run(arguments)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def test_a_key_is_made_listed_rotated_and_revoked_in_the_storage_that_is_named(kmq, tmp_path):
    storage = f"sqlite:///{tmp_path}/other.db"
    code, secret, told = kmq("key", "--storage", storage, "create", "--role", "queue_post", "--requests", "5")
    assert code == 0
    assert f"gateways over {storage}" in told
    assert kmq("key", "list", "-o", "json") == (0, "", ""), "in the default storage there is none"
    (listed,) = kmq("key", "--storage", storage, "list", "-o", "json")[1].splitlines()
    key = json.loads(listed)
    assert (key["roles"], key["requests_per_s"]) == (["queue_post"], 5)
    assert "digests" not in key
    assert secret.strip() not in listed
    assert kmq("key", "--storage", storage, "rotate", key["id"])[1] not in {"", secret}
    assert kmq("key", "--storage", storage, "revoke", key["id"])[0] == 0
    assert kmq("key", "--storage", storage, "revoke", key["id"])[0] == 2


def test_a_key_for_sqs_is_made_of_the_operators_key(kmq, tmp_path, monkeypatch):
    code, _, told = kmq("key", "create", "--aws", "--role", "queue_standard")
    assert (code, "openssl rand" in told) == (2, True)
    file = tmp_path / "operator.key"
    file.write_text("k" * 40 + "\n")
    code, printed, _ = kmq("key", "create", "--aws", "--aws-key", str(file), "--role", "queue_standard")
    key_id, secret = (line.partition(" = ")[2] for line in printed.splitlines())
    (listed,) = kmq("key", "list", "-o", "json")[1].splitlines()
    assert json.loads(listed)["id"] == key_id
    assert "nonces" not in listed
    code, _, told = kmq("key", "rotate", key_id)
    assert (code, "--aws-key" in told) == (2, True)
    monkeypatch.setenv("KMQ_AWS_KEY", "k" * 40)
    assert kmq("key", "rotate", key_id)[1].strip() not in {"", secret}
    monkeypatch.setenv("KMQ_AWS_KEY", "short")
    assert "too few" in kmq("key", "rotate", key_id)[2]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("create",), "give a --role or a --permission"),
        (("create", "--permission", "x"), "permits nothing"),
        (("create", "--permission", "queue|read|x"), "permits nothing"),
        (("create", "--role", "x"), "is none of queue_post"),
        (("create", "--role", "queue_post", "--requests", "0"), "requests_per_s"),
        (("revoke", "x"), "kmq key list"),
        (("rotate", "x"), "kmq key list"),
    ],
)
def test_bad_use_of_keys(kmq, arguments, text):
    code, out, told = kmq("key", *arguments)
    assert (code, out) == (2, "")
    assert text in told


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("kafka://127.0.0.1:1",), "?zookeeper=host:2181"),
        (("memory:", "--port", "18099", "--admin-port", "18099"), "admin_port"),
        (("memory:", "--host", "0.0.0.0"), "kmq key --storage URL create"),
        (("memory:", "memory:"), "write NAME=URL"),
        (("postgresql://me:secret@db/x",), "KMQ_QUEUE_URL"),
        (("memory:", "--tls-cert", "x.pem"), "give both"),
        (("http://x",), "is another gateway"),
        (("ftp://x",), "no storage for ftp"),
        (("memory:", "--cluster-name", "a/b"), "cluster name: 'a/b'"),
        (("memory:", "--drain", "1d"), "drain: 86400 s must be from 0 to 3600 s"),
        (("memory:", "--tls-cert", "x.pem", "--tls-key", "y.pem"), "tls_cert: x.pem can't be read"),
    ],
)
def test_bad_use_of_gateways(kmq, arguments, text):
    code, out, told = kmq("gateway", *arguments)
    assert (code, out) == (2, "")
    assert text in told
    assert "me:secret" not in told


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ((), "clients are told 127.0.0.1, which is each machine itself"),
        (("--advertise", "localhost"), "clients are told localhost, which is each machine itself"),
        (("--advertise", "queues.example"), "but --host 127.0.0.1 lets in this machine"),
    ],
)
def test_an_address_that_clients_on_other_machines_cannot_use(kmq, monkeypatch, options, text):
    monkeypatch.setattr("kmqpy.gateway.run.run", lambda *args, **kwargs: None)
    code, _, told = kmq("gateway", "memory:", "--discovery", "127.0.0.1:1", *options)
    assert code == 0
    assert text in told
    assert text not in kmq("gateway", "memory:", *options)[2]


def test_storages_with_passwords_stand_in_the_environment_each_in_a_line(kmq, monkeypatch, tmp_path):
    served = {}
    monkeypatch.setattr("kmqpy.gateway.run.run", lambda _, storages, *args, **kwargs: served.update(storages))
    monkeypatch.setenv("KMQ_QUEUE_URL", f"sqlite:///{tmp_path}/a.db\n orders=sqlite:///{tmp_path}/b c.db \n")
    assert kmq("gateway")[0] == 0
    assert served.keys() == {"", "orders"}


def test_where_the_storage_keeps_no_keys_a_gateway_advises_a_file(kmq, monkeypatch):
    monkeypatch.setattr("kmqpy.gateway.run.run", lambda *args, **kwargs: None)
    monkeypatch.setattr("kmqpy.cli.gateway._keys", lambda *args, **kwargs: None)
    assert "; kmq key --keys FILE create --role queue_standard, then" in kmq("gateway", "memory:")[2]


@pytest.mark.parametrize("in_file", [False, True])
def test_what_a_gateway_without_keys_advises_makes_one(kmq, monkeypatch, tmp_path, in_file):
    monkeypatch.setattr("kmqpy.gateway.run.run", lambda *args, **kwargs: None)
    url, keys = f"sqlite:///{tmp_path}/q.db", ("--keys", str(tmp_path / "keys"))
    told = kmq("gateway", url, *keys * in_file)[2]
    code, secret, _ = kmq(*told.rpartition("; kmq ")[2].split())
    assert (code, len(secret.split())) == (0, 1)
    assert "; kmq " not in kmq("gateway", url, *keys * in_file)[2]
