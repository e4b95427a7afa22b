"""The contract suite: pytest tests of the promises that every storage must keep.

A `Target` describes the storage under test. `pytest --kmq-storage=URL` runs the suite on the storage of a
url. A test module of a storage runs the suite like this:

    import pytest

    from kmqpy.testing.contract import *  # the tests and their fixtures

    @pytest.fixture
    def kmq_target():
        return Target(open=..., kill_server=...)
"""

from kmqpy.testing.contract.administration import *
from kmqpy.testing.contract.arguments import *
from kmqpy.testing.contract.at_most_once import *
from kmqpy.testing.contract.collapse import *
from kmqpy.testing.contract.counting import *
from kmqpy.testing.contract.dedup import *
from kmqpy.testing.contract.groups import *
from kmqpy.testing.contract.leases import *
from kmqpy.testing.contract.outages import *
from kmqpy.testing.contract.retries import *
from kmqpy.testing.contract.sending import *
from kmqpy.testing.contract.shares import *
from kmqpy.testing.contract.target import *
