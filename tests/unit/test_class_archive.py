"""Archives of Java classes, and what else the embedded servers keep for their next start; without Java."""

from dataclasses import replace
from pathlib import Path

import pytest

from kmqpy.dev import Cluster, kafka, remade_files, zookeeper
from kmqpy.dev import cluster as cluster_module
from kmqpy.dev.class_archive import ClassArchive, archive_for
from kmqpy.errors import ClusterError

# A Java that notes its arguments; a server ends when it is told to, and then writes the archive asked for.
# It crashes with a damaged archive.
JAVA = """#!/bin/sh
for last; do
    case "$last" in
    -XX:ArchiveClassesAtExit=*) recording=${last#*=} ;;
    -XX:SharedArchiveFile=*) grep -q classes "${last#*=}" || exit 134 ;;
    esac
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


@pytest.fixture
def run(java, jar, tmp_path, monkeypatch):
    """Start and stop servers; returns their folder, and how each program of Java was called."""
    java.write_text(JAVA)
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(java.parents[1]))
    monkeypatch.setenv("KMQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cluster_module, "jar_set", lambda kind: [jar])
    monkeypatch.setattr(cluster_module, "remove_damaged", lambda kind: [])
    monkeypatch.setattr(zookeeper, "KIND", replace(zookeeper.KIND, answers=kafka.KIND.answers))

    def run() -> tuple[Path, dict[str, str]]:
        calls = java.parents[1] / "calls"
        calls.unlink(missing_ok=True)
        with Cluster() as cluster:
            pass
        lines = [line for line in calls.read_text().splitlines() if line != "-version"]
        programs = (kafka.KIND.main_class, zookeeper.KIND.main_class, "StorageTool")
        return cluster.folder, {one: line for one in programs for line in lines if f"{one} " in line}

    return run


def test_the_archive_of_a_kind_depends_on_the_java_and_the_jars(java, jar, tmp_path):
    first = archive_for("kafka", java, [jar], tmp_path)
    assert archive_for("kafka", java, [jar], tmp_path) == first
    jar.write_bytes(b"12")
    second = archive_for("kafka", java, [jar], tmp_path)
    java.write_bytes(b"another")
    third = archive_for("kafka", java, [jar], tmp_path)
    assert len({first, second, third}) == 3


def test_a_java_without_an_archive_of_its_own_records_none(java, jar, tmp_path):
    (java.parents[1] / "lib" / "server" / "classes.jsa").unlink()
    assert archive_for("kafka", java, [jar], tmp_path) is None


def test_a_recording_is_kept_in_the_place_of_earlier_ones_of_its_kind(tmp_path):
    archive, recording = ClassArchive("kafka", "2", tmp_path / "cache"), tmp_path / "broker-1.jsa"
    archive.folder.mkdir()
    for other in ("kafka-1.0123456789abcdef.jsa", "zookeeper-1.0123456789abcdef.jsa"):
        (archive.folder / other).touch()
    assert archive.java_options(None) == []
    assert archive.java_options(recording)[0] == f"-XX:ArchiveClassesAtExit={recording}"
    recording.write_bytes(b"classes")
    archive.keep(recording)
    kept = {path.name.partition(".")[0]: path for path in archive.folder.iterdir()}
    assert kept.keys() == {"kafka-2", "zookeeper-1"}
    assert archive.java_options(recording)[0] == f"-XX:SharedArchiveFile={kept['kafka-2']}"


def test_what_the_first_servers_keep_the_next_ones_use(run, tmp_path):
    """The archives of both kinds, and what Kafka's format tool wrote."""
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


def test_damaged_files_in_the_cache_are_made_again(run, tmp_path):
    """Both archives, and what Kafka's format tool wrote."""
    run()
    kept = sorted(path for path in (tmp_path / "cache").rglob("*") if path.is_file())
    good = [path.read_bytes() for path in kept]
    assert len(kept) == 3
    for path in kept:
        path.write_bytes(b"damaged")
    _, again = run()
    assert "StorageTool" in again
    assert [path.read_bytes() for path in kept] == good


def test_a_damaged_jar_is_fetched_again_when_a_server_does_not_start(run, java, jar, monkeypatch):
    java.write_text(JAVA.replace("\ntrap", f"\ngrep -q good {jar} || exit 1\ntrap"))
    monkeypatch.setattr(cluster_module, "START_ATTEMPTS", 2)
    with pytest.raises(ClusterError, match="exit code 1"):
        run()

    def remove_damaged(kind: str) -> list[Path]:
        damaged = jar.read_bytes() != b"good"
        jar.write_bytes(b"good")
        return [jar] if damaged else []

    monkeypatch.setattr(cluster_module, "remove_damaged", remove_damaged)
    run()


def test_a_file_that_another_process_has_removed_counts_as_removed(tmp_path):
    (tmp_path / "made").write_bytes(b"1")
    kept = remade_files.keep(tmp_path / "made", tmp_path / "cache", "a.jsa")
    assert not remade_files.remove_if_damaged(kept)
    kept.unlink()
    assert remade_files.remove_if_damaged(kept)


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
