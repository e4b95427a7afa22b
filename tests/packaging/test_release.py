"""What `make release-check` looks at before it builds; the rest takes minutes, a tag's workflow runs it."""

import json
import os
import posixpath
import re
import subprocess
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

from tests import pythons
from tests.brokers import broker as brokers
from tests.packaging.release import ROOT, SBOM, check_lock, check_version, check_wheel


@pytest.fixture
def changelog(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("tests.packaging.release.ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "all.yaml").write_text("    newTag: 1.2.3\n")
    (tmp_path / "README.md").write_text("pip install kmqpy[sql]==1.2.3\n")
    path = tmp_path / "CHANGELOG.md"
    path.write_text("# Changelog\n\n## [1.2.3] - 2026-12-01\n\n## [1.2.2] - 2026-11-01\n")
    return path


def test_a_version_that_all_name_can_be_released(changelog):
    check_version("1.2.3", "v1.2.3")


@pytest.mark.parametrize(
    ("version", "tag", "old", "new", "said"),
    [
        ("1.2.3", "v1.2.4", "", "", r"tag v1\.2\.4"),
        ("1.2.3", "v1.2.3", "## [1.2.3] - 2026-12-01", "## [Unreleased]", "its first section must be"),
        ("1.2.3", "v1.2.3", " - 2026-12-01", "", "its first section must be"),
        ("1.2.3", None, "[1.2.3]", "[1.2.4]", "its first section must be"),
        ("1.2.3", None, " - 2026-12-01", "", "its first section must be"),
        ("1.2.2", None, "## [1.2.3] - 2026-12-01", "## [Unreleased]", "changes above those of 1.2.2"),
        ("1.2.4", None, "## [1.2.3] - 2026-12-01", "## [Unreleased]", r"README\.md: kmqpy 1\.2\.3"),
    ],
)
def test_versions_that_disagree_are_named(changelog, version, tag, old, new, said):
    changelog.write_text(changelog.read_text().replace(old, new))
    with pytest.raises(SystemExit, match=said):
        check_version(version, tag)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("README.md", "kmqpy==1.2.2"),
        ("SECURITY.md", "kmqpy[cli,sql]==1.2.2"),
        ("docs/kubernetes.md", "docker push registry.example.org/kmqpy:1.2.2"),
        ("deploy/all.yaml", "newTag: 1.2.2"),
    ],
)
def test_a_file_with_another_version_is_named(changelog, file, text):
    (changelog.parent / file).write_text(text)
    with pytest.raises(SystemExit, match=rf"^{file}: kmqpy 1\.2\.2"):
        check_version("1.2.3", None)


def test_before_a_release_the_changelog_may_have_what_is_unreleased(changelog):
    changelog.write_text(changelog.read_text().replace("## [1.2.3] - 2026-12-01", "## [Unreleased]"))
    check_version("1.2.3", None)


def test_the_versions_of_this_tree_agree():
    check_version(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"], None)


def test_the_versions_that_are_claimed_are_those_that_are_run():
    page = (ROOT / "docs/versions.md").read_text()
    rows = {
        line.split(" | ")[0].strip("| "): line.split(" | ")[-1]
        for line in page.splitlines()
        if line[:1] == "|"
    }
    jars = (ROOT / "kmqpy/dev/jars.json").read_text()
    newest = {
        name: re.search(rf'"org\.apache\.{name}:[\w.]+:([\d.]+)"', jars)[1] for name in ("kafka", "zookeeper")
    }
    assert {*re.findall(r"\d+\.\d+\.\d+", rows["Kafka"])} == {newest["kafka"], *brokers.VERSIONS}
    assert newest["zookeeper"] in rows["ZooKeeper"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    classifiers = project["classifiers"]
    ci = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["python"]["strategy"]
    assert {*pythons.VERSIONS} == {*ci["matrix"]["python"]}
    assert {*re.findall(r"Python :: (3\.\d+)", str(classifiers))} == {
        project["requires-python"].removeprefix(">="),
        *pythons.VERSIONS,
    }
    assert [one for one in classifiers if "Operating System" in one] == ["Operating System :: POSIX :: Linux"]
    assert rows["platform"].startswith("Linux, ")


def test_the_image_is_pushed_under_the_name_that_manifests_have(tmp_path):
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    (step,) = (step for step in jobs["image"]["steps"] if step.get("id") == "image")
    repository = {"GITHUB_REPOSITORY": "Owner/Kmqpy", "GITHUB_REF_NAME": "v1.2.3", "REGISTRY": "example.org"}
    environment = {**os.environ, **repository, "GITHUB_OUTPUT": str(tmp_path / "output")}
    subprocess.run(["bash", "-ec", step["run"]], env=environment, check=True)
    assert (tmp_path / "output").read_text() == "tag=example.org/owner/kmqpy:1.2.3\n"


def test_the_sbom_names_what_the_lock_pins():
    lock = (ROOT / "requirements.lock").read_text()
    made = json.loads(SBOM.read_text())
    named = {one["name"]: one["version"] for one in made["components"]}
    needed = {one["ref"]: one.get("dependsOn") for one in made["dependencies"]}
    assert needed[made["metadata"]["component"]["bom-ref"]] == [one["bom-ref"] for one in made["components"]]
    assert named.keys() == {"confluent-kafka", "kazoo", "prometheus-client"}
    assert named == {name: re.search(rf"^{name}==([^ ;]+)", lock, re.MULTILINE)[1] for name in named}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r"^kazoo==.*", r"kazoo==2.9 \\"),
        (r"^kazoo==", "other=="),
        (r"^msgspec==", "other=="),
        (r"--hash=", ""),
    ],
)
def test_a_lock_that_does_not_pin_what_is_asked_for_is_refused(old, new):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lock = (ROOT / "requirements.lock").read_text()
    check_lock(project, lock)
    with pytest.raises(SystemExit, match=r"^requirements\.lock: .*run `make lock`"):
        check_lock(project, re.sub(old, new, lock, flags=re.MULTILINE))


WHOLE = dict.fromkeys(("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"), b"")


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("sboms/sbom.cdx.json", b"{}"),
        ("sbom.cdx.json", SBOM.read_bytes()),
        ("../kmqpy/tests/.env", b""),
        ("licenses/LICENSE", None),
        ("entry_points.txt", None),
    ],
)
def test_a_wheel_that_lacks_something_or_has_more_is_refused(tmp_path, place, text):
    def made(files: dict[str, bytes | None]) -> Path:
        wheel = tmp_path / "kmqpy-1.2.3-py3-none-any.whl"
        with ZipFile(wheel, "w") as archive:
            archive.writestr("kmqpy/py.typed", b"")
            for name, what in files.items():
                if what is not None:
                    archive.writestr(posixpath.normpath(f"kmqpy-1.2.3.dist-info/{name}"), what)
        return wheel

    whole = {**WHOLE, "sboms/sbom.cdx.json": SBOM.read_bytes()}
    check_wheel(made(whole), ["kmqpy/py.typed"])
    with pytest.raises(SystemExit, match=r"kmqpy-1\.2\.3-py3-none-any\.whl: "):
        check_wheel(made({**whole, place: text}), ["kmqpy/py.typed"])
