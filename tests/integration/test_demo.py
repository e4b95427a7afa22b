"""The demo ends, also when a part of it does not work."""

import pytest

from kmqpy.dev import demo
from kmqpy.errors import ClusterError


def test_a_consumer_that_dies_ends_the_demo_with_its_last_words(monkeypatch):
    start = demo._Demo._process

    def dies(self, name, *arguments):
        if name == "consumer-2":
            arguments = ("-c", "import sys; sys.exit('too bad')")
        return start(self, name, *arguments)

    monkeypatch.setattr(demo._Demo, "_process", dies)
    with pytest.raises(ClusterError, match="the demo's consumer-2 ended: too bad"):
        demo.run(200, lambda _: None)
