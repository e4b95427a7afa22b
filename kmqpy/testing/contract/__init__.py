"""The contract suite: what every storage must do, as pytest tests over a `Target`.

Run it on a url with `pytest --kmq-storage=URL`; or in a test module of a storage:

    import pytest

    from kmqpy.testing.contract import *  # the tests and their fixtures

    @pytest.fixture
    def kmq_target():
        return Target(open=..., kill_server=...)
"""

from kmqpy.testing.contract.administration import *
from kmqpy.testing.contract.arguments import *
from kmqpy.testing.contract.counting import *
from kmqpy.testing.contract.leases import *
from kmqpy.testing.contract.outages import *
from kmqpy.testing.contract.sending import *
from kmqpy.testing.contract.target import *
