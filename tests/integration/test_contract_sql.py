"""The contract of all storages, on PostgreSQL, MariaDB and SQLite."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import sqlalchemy

pytest.register_assert_rewrite("kmqpy.testing.contract")

from kmqpy.core.clock import Clock  # noqa: E402
from kmqpy.dev import Databases  # noqa: E402
from kmqpy.queue import parse_url, storage_for  # noqa: E402
from kmqpy.storages.sql.opening import open_storage  # noqa: E402
from kmqpy.storages.stored_storage import StoredStorage  # noqa: E402
from kmqpy.testing.contract import *  # noqa: E402, F403
from kmqpy.testing.contract import Target  # noqa: E402
