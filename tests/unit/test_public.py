"""The public surface of the package."""

import subprocess
import sys

import pytest

import kmqpy


def test_all_names_are_there_and_nothing_else_is_public() -> None:
    assert kmqpy.__all__ == sorted(kmqpy.__all__)
    assert len(kmqpy.__all__) <= 25
    for name in kmqpy.__all__:
        thing = getattr(kmqpy, name)
        assert (thing.__doc__ or "").strip(), f"{name} has no docstring"


HEAVY = ("confluent_kafka", "kazoo", "pandas", "pyarrow", "pyspark", "prometheus_client", "click")


def loaded_by(code):
    """Which of the heavy packages a program loads."""
    tell = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    program = [sys.executable, "-c", f"{code}\n{tell}"]
    ended = subprocess.run(program, capture_output=True, text=True, check=True)
    return sorted({*ended.stdout.splitlines()[-1].split()} & {*HEAVY})


def test_to_import_kmqpy_loads_nothing_heavy():
    assert loaded_by("import kmqpy; kmqpy.KmqError") == []
    assert "confluent_kafka" in loaded_by("from kmqpy import KmqClient")


def test_the_help_of_commands_loads_nothing_of_spark():
    code = "from kmqpy.cli.app import run; run(['--help'])"
    assert not {"pandas", "pyarrow", "pyspark"} & {*loaded_by(code)}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'kmqpy' has no attribute 'Nothing'"):
        kmqpy.Nothing  # noqa: B018
    assert set(kmqpy.__all__) <= set(dir(kmqpy))
