"""The dialect of MySQL, which has neither sequences nor RETURNING."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kmqpy.errors import ConfigError
from kmqpy.storages.sql.dialect import Cursor
from kmqpy.storages.sql.over_pymysql import OverPyMySql
from kmqpy.storages.sql.tables import DialectName

_OLDEST = (8, 0, 17)
"""Has SKIP LOCKED, window functions, and the collation utf8mb4_0900_bin."""


class MySql(OverPyMySql):
    """Implements Dialect for MySQL."""

    name: DialectName = "mysql"
    drivername = "mysql+pymysql"
    sql_mode = "STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION"

    def check_server(self, version: str) -> None:
        if "MariaDB" in version:
            raise ConfigError(f"queue url: the server is MariaDB ({version}); write mariadb:// for mysql://")
        numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
        if numbers is None or tuple(map(int, numbers.groups())) < _OLDEST:
            oldest = ".".join(map(str, _OLDEST))
            raise ConfigError(f"queue url: the server is MySQL {version}; {oldest} or newer is needed")

    def new_ids(self, cursor: Cursor, count: int, step: int) -> Sequence[int]:
        """See OverPyMySql. An INSERT of a known number of rows gets ids in a row, whatever others insert."""
        first: int = cursor.lastrowid
        return range(first, first + count * step, step)
