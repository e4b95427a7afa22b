"""Archives of Java classes, and what else the embedded servers keep for their next start; without Java."""

from dataclasses import replace
from pathlib import Path

import pytest

from kmqpy.dev import Cluster, class_archive, kafka, zookeeper
from kmqpy.dev import cluster as cluster_module

# A Java that notes its arguments; a server ends when it is told to, and then writes the archive asked for.
JAVA = """#!/bin/sh
for last; do
    case "$last" in -XX:ArchiveClassesAtExit=*) recording=${last#*=} ;; esac
done
echo "$*" >> "$JAVA_HOME/calls"
case "$*" in
-version)
    echo 'openjdk version "21"' >&2
    exit ;;
*StorageTool*)
    mkdir "$(dirname "$last")/data"
    cd "$(dirname "$last")/data" && touch meta.properties bootstrap.checkpoint
    exit ;;
esac
trap 'echo classes > "${recording:-/dev/null}"; kill $!; exit 143' TERM
sleep 100 &
echo Kafka Server started
wait
"""


@pytest.fixture
def java(tmp_path: Path) -> Path:
    """A Java with an archive of its own classes."""
    for file in ("bin/java", "lib/server/classes.jsa"):
        (tmp_path / "jdk" / file).parent.mkdir(parents=True)
        (tmp_path / "jdk" / file).touch()
    return tmp_path / "jdk" / "bin" / "java"


@pytest.fixture
def jar(tmp_path: Path) -> Path:
    path = tmp_path / "a.jar"
    path.write_bytes(b"1")
    return path


def test_the_archive_of_a_kind_depends_on_the_java_and_the_jars(java, jar, tmp_path):
    first = class_archive.archive_path("kafka", java, [jar], tmp_path)
    assert class_archive.archive_path("kafka", java, [jar], tmp_path) == first
    jar.write_bytes(b"12")
    second = class_archive.archive_path("kafka", java, [jar], tmp_path)
    java.write_bytes(b"another")
    third = class_archive.archive_path("kafka", java, [jar], tmp_path)
    assert len({first, second, third}) == 3


def test_a_java_without_an_archive_of_its_own_records_none(java, jar, tmp_path):
    (java.parents[1] / "lib" / "server" / "classes.jsa").unlink()
    assert class_archive.archive_path("kafka", java, [jar], tmp_path) is None


def test_a_recording_is_kept_in_the_place_of_earlier_ones_of_its_kind(tmp_path):
    archive, recording = tmp_path / "cache" / "kafka-2.jsa", tmp_path / "broker-1.jsa"
    archive.parent.mkdir()
    for other in ("kafka-1.jsa", "zookeeper-1.jsa"):
        (archive.parent / other).touch()
    assert class_archive.java_options(archive, None) == []
    assert class_archive.java_options(archive, recording)[0] == f"-XX:ArchiveClassesAtExit={recording}"
    recording.write_bytes(b"classes")
    class_archive.keep(recording, archive)
    assert sorted(path.name for path in archive.parent.iterdir()) == ["kafka-2.jsa", "zookeeper-1.jsa"]
    assert class_archive.java_options(archive, recording)[0] == f"-XX:SharedArchiveFile={archive}"


def test_what_the_first_servers_keep_the_next_ones_use(java, jar, tmp_path, monkeypatch):
    """The archives of both kinds, and what Kafka's format tool wrote."""
    java.write_text(JAVA)
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(java.parents[1]))
    monkeypatch.setenv("KMQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cluster_module, "jar_set", lambda kind: [jar])
    started = replace(zookeeper.KIND, answers=kafka.KIND.answers)
    monkeypatch.setattr(zookeeper, "KIND", started)

    def run() -> tuple[Path, dict[str, str]]:
        """Start and stop servers; their folder, and how each program of Java was called."""
        calls = java.parents[1] / "calls"
        calls.unlink(missing_ok=True)
        with Cluster() as cluster:
            pass
        lines = [line for line in calls.read_text().splitlines() if line != "-version"]
        programs = (kafka.KIND.main_class, zookeeper.KIND.main_class, "StorageTool")
        return cluster.folder, {one: line for one in programs for line in lines if f"{one} " in line}

    folder, first = run()
    servers = {kafka.KIND.main_class: "broker-1", zookeeper.KIND.main_class: "zookeeper-1"}
    for program, name in servers.items():
        assert f"-XX:ArchiveClassesAtExit={folder / name}.jsa " in first[program]
    assert "ArchiveClassesAtExit" not in first["StorageTool"]
    archives = {path.name.partition("-")[0]: path for path in (tmp_path / "cache" / "classes").iterdir()}
    assert archives.keys() == {"kafka", "zookeeper"}

    _, second = run()
    assert second.keys() == servers.keys()
    for program, name in servers.items():
        kind = "kafka" if name == "broker-1" else "zookeeper"
        assert f"-XX:SharedArchiveFile={archives[kind]} " in second[program]


def test_data_folders_are_formatted_once_and_differ_in_their_ids(tmp_path, monkeypatch):
    monkeypatch.setenv("KMQ_CACHE", str(tmp_path / "cache"))
    formatted = []

    def run_format_tool(config: Path, cluster_id: str, *_: object) -> None:
        formatted.append(config)
        data = config.parent / "data"
        data.mkdir()
        (data / "bootstrap.checkpoint").write_bytes(b"features")
        (data / "meta.properties").write_text(f"cluster.id={cluster_id}\nnode.id=1\ndirectory.id=first\n")

    monkeypatch.setattr(kafka, "_run_format_tool", run_format_tool)
    found = {}
    for cluster_id in ("a", "b"):
        configs = [tmp_path / cluster_id / f"broker-{number}" / kafka.CONFIG for number in (1, 2)]
        for config in configs:
            config.parent.mkdir(parents=True)
        for _ in range(2):  # the second time nothing is changed
            kafka.format_storage(configs, cluster_id, ["java"], "jars")
            for number, config in enumerate(configs, 1):
                data = config.parent / "data"
                properties = dict(
                    line.split("=") for line in (data / "meta.properties").read_text().splitlines()
                )
                assert (properties["cluster.id"], properties["node.id"]) == (cluster_id, str(number))
                assert (data / "bootstrap.checkpoint").read_bytes() == b"features"
                found.setdefault((cluster_id, number), set()).add(properties["directory.id"])
    assert len(set.union(*found.values())) == len(found) == 4
    assert len(formatted) == 1
    kafka.format_storage([tmp_path / "a" / "broker-1" / kafka.CONFIG], "a", ["java"], "other jars")
    assert len(formatted) == 1, "that folder is formatted"
