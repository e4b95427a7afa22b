"""What `make release-check` looks at before it builds; the rest takes minutes, a tag's workflow runs it."""

import json
import re
from pathlib import Path

import pytest

from tests.packaging.release import ROOT, check_version


@pytest.fixture
def changelog(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("tests.packaging.release.ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
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
        ("1.2.4", None, "", "", r"README\.md: kmqpy==1\.2\.3"),
    ],
)
def test_versions_that_disagree_are_named(changelog, version, tag, old, new, said):
    changelog.write_text(changelog.read_text().replace(old, new))
    with pytest.raises(SystemExit, match=said):
        check_version(version, tag)


def test_the_sbom_names_what_the_lock_pins():
    lock = (ROOT / "requirements.lock").read_text()
    named = {
        one["name"]: one["version"] for one in json.loads((ROOT / "sbom.cdx.json").read_text())["components"]
    }
    assert named.keys() == {"confluent-kafka", "kazoo", "prometheus-client"}
    assert named == {name: re.search(rf"^{name}==([^ ;]+)", lock, re.MULTILINE)[1] for name in named}
