"""What `make release-check` looks at before it builds; the rest takes minutes, a tag's workflow runs it."""

import json
import re
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.packaging.release import ROOT, SBOM, check_sbom_of, check_version


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


def test_the_sbom_names_what_the_lock_pins():
    lock = (ROOT / "requirements.lock").read_text()
    named = {
        one["name"]: one["version"] for one in json.loads((ROOT / "sbom.cdx.json").read_text())["components"]
    }
    assert named.keys() == {"confluent-kafka", "kazoo", "prometheus-client"}
    assert named == {name: re.search(rf"^{name}==([^ ;]+)", lock, re.MULTILINE)[1] for name in named}


@pytest.mark.parametrize(
    ("place", "text", "is_right"),
    [
        ("kmqpy-1.2.3.dist-info/sboms/sbom.cdx.json", SBOM.read_bytes(), True),
        ("kmqpy-1.2.3.dist-info/sboms/sbom.cdx.json", b"{}", False),
        ("kmqpy/sbom.cdx.json", SBOM.read_bytes(), False),
    ],
)
def test_the_sbom_lies_in_the_wheel(tmp_path, place, text, is_right):
    wheel = tmp_path / "kmqpy-1.2.3-py3-none-any.whl"
    with ZipFile(wheel, "w") as files:
        files.writestr(place, text)
    if is_right:
        check_sbom_of(wheel)
        return
    with pytest.raises(SystemExit, match=r"sboms/sbom\.cdx\.json"):
        check_sbom_of(wheel)
