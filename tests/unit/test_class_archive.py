"""Archives of Java classes, without Java."""

from pathlib import Path

import pytest

from kmqpy.dev import class_archive


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
