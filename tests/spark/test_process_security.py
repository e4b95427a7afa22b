"""Processing where Kafka wants a password over TLS, and ACLs are in force."""

from collections import Counter
from pathlib import Path

import pytest
from security_support import client_acls, grant, live, secured  # noqa: F401  # fixtures
from support import until
from test_process import Run, bodies

from kmqpy.spark import KmqSpark, register
from kmqpy.spark.source import KmqDataSource


@pytest.mark.breadth
def test_executors_need_neither_files_nor_zookeeper(spark, secured, live, tmp_path):  # noqa: F811
    grant(secured, "client", *client_acls(live.name))
    live.send(*bodies(20))
    ca = tmp_path / "ca.pem"
    ca.write_text(Path(secured.files.ca).read_text())
    connection = secured.connection("client", kafka=secured.kafka("client", ca=str(ca)))
    run = Run(spark, live, tmp_path / "checkpoint")
    run.kmq = KmqSpark(spark, connection, live.settings)
    register(spark)
    settings = {f"kafka.{name}": value for name, value in connection.kafka.items()}
    own = spark.readStream.format(KmqDataSource.name()).options(
        **settings, bootstrap=connection.bootstrap, queue=live.name
    )
    with run.kmq:
        out = run.kmq.process(run.kmq.read_stream(), lambda frame: frame, "value binary")
        writer = run.writer(out).trigger(availableNow=True)
        ca.unlink()  # from here on only executors ask for it
        run.kmq.await_termination(writer.start())
        until(run.settled)
        assert run.got == Counter(bodies(20))
        # Where the query is planned, the file is needed again.
        ca.write_text(Path(secured.files.ca).read_text())
        live.send("last")
        run.checkpoint = str(tmp_path / "other")
        run.once(run.kmq.process(own.load(), lambda frame: frame, "value binary"))
    assert run.got == Counter([*bodies(20), "last"])
