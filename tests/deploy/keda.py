"""KEDA's own definitions of its resources, as classes: a package from PyPI, kept in the cache."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from kmqpy.dev.jars import cache_folder

_PACKAGES = ("cloudcoil-models-keda==2.16.1.0", "cloudcoil==0.6.0", "pydantic>=2,<3")
"""The newest definitions that a package has. The settings of a trigger are free text in all of them."""

_VALIDATE = """
import json, sys
from cloudcoil.models.keda.v1alpha1 import ScaledObject

def unknown(given, known, place):
    if isinstance(given, list):
        for number, one in enumerate(given):
            yield from unknown(one, known[number], f"{place}[{number}]")
    elif isinstance(given, dict):
        for name, one in given.items():
            if name in known:
                yield from unknown(one, known[name], f"{place}.{name}")
            else:
                yield f"{place}.{name}: no such field"

def problems(resource):
    try:
        made = ScaledObject.model_validate(resource)
    except ValueError as error:
        return str(error)
    return "\\n".join(unknown(resource, made.model_dump(mode="json", by_alias=True, exclude_unset=True), ""))

json.dump([problems(resource) for resource in json.load(sys.stdin)], sys.stdout)
"""


def problems(*scaled_objects: dict[str, Any]) -> list[str]:
    """What KEDA's definition of a ScaledObject says against each; empty: nothing."""
    done = subprocess.run(
        [sys.executable, "-c", _VALIDATE],
        env={**os.environ, "PYTHONPATH": str(_packages())},
        input=json.dumps(scaled_objects),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    found: list[str] = json.loads(done.stdout)
    return found


def _packages() -> Path:
    folder = cache_folder() / _PACKAGES[0]
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", f"{made}/packages"]
            subprocess.run([*install, *_PACKAGES], check=True, capture_output=True, timeout=300)
            if not folder.exists():  # another worker may have been faster
                (Path(made) / "packages").rename(folder)
    return folder
