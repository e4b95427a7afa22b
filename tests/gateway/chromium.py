"""Finds a Chromium: on the PATH, or Debian's headless one, which debian.py fetches once."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from kmqpy.dev.debian import from_debian
from kmqpy.errors import ClusterError

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
_LARGE = ("libLLVM", "libgallium", "libz3")
"""Libraries of graphics cards, which a headless one never loads."""
_FONTS = """<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd"><fontconfig>
<dir>{fonts}</dir><cachedir>{cache}</cachedir>
<alias><family>system-ui</family><prefer><family>DejaVu Sans</family></prefer></alias>
<alias><family>ui-monospace</family><prefer><family>DejaVu Sans Mono</family></prefer></alias>
</fontconfig>
"""


def _is_wanted(member: str) -> bool:
    name = member.rpartition("/")[2]
    is_library = member.startswith("usr/lib/") and member.count("/") <= 4 and ".so" in name
    is_library = is_library and "/dri/" not in member and not name.startswith(_LARGE)
    return is_library or member.startswith(("usr/lib/chromium/", "usr/share/fonts/"))


def _program(folder: Path) -> tuple[Path, dict[str, str]]:
    """A script that runs Chromium, and its environment; skips the test without one."""
    for name in _NAMES:
        if found := shutil.which(name):
            return Path(found), {}
    try:
        root = from_debian("chromium-headless-shell", _is_wanted, "install Chromium")
    except ClusterError as error:
        pytest.skip(f"no Chromium can be had: {error}")
    home = root / "usr/lib/chromium"
    (loader,) = root.glob("usr/lib/*/ld-linux*")
    own = home / "loader"  # it looks for its files beside the program that runs: that is the loader
    if not own.exists():
        scratch = home / f"loader-{os.getpid()}"
        shutil.copy(loader, scratch)
        scratch.rename(own)
    libraries = f"{loader.parent}:{loader.parent}/pulseaudio:{home}"
    script = folder / "chromium"
    script.write_text(
        f"#!/bin/sh\nexec {own} --library-path {libraries} {home}/chromium-headless-shell "
        f'--browser-subprocess-path={script} --no-zygote "$@"\n'
    )
    script.chmod(0o755)
    fonts = folder / "fonts.conf"
    fonts.write_text(_FONTS.format(fonts=root / "usr/share/fonts", cache=folder / "fonts"))
    return script, {"FONTCONFIG_FILE": str(fonts)}


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """A Chromium that runs; `folder` is for its own files."""
    program, environment = _program(folder)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program,
            args=["--no-sandbox"] if os.geteuid() == 0 else [],
            env={**os.environ, **environment},
        )
        yield browser
        browser.close()
