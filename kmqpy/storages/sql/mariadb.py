"""The dialect of MariaDB."""

from __future__ import annotations

from collections.abc import Sequence

from kmqpy.errors import ConfigError
from kmqpy.storages.sql.dialect import Cursor, DedupKey, Parameters
from kmqpy.storages.sql.over_pymysql import OverPyMySql
from kmqpy.storages.sql.tables import DialectName


class MariaDb(OverPyMySql):
    """Implements Dialect for MariaDB."""

    name: DialectName = "mariadb"
    drivername = "mariadb+pymysql"
    sql_mode = "STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION,SIMULTANEOUS_ASSIGNMENT"

    def check_server(self, version: str) -> None:
        if "MariaDB" not in version:
            raise ConfigError(f"queue url: the server is MySQL {version}; write mysql:// for mariadb://")

    def claim_keys(self, cursor: Cursor, parameters: Parameters, keys: Sequence[str]) -> list[DedupKey]:
        """See Dialect. Keys are claimed in order, so that two who send the same ones cause no deadlock."""
        row = self.sql["key_row"]
        rows = [cursor.mogrify(row, {**parameters, "dedup": key}) for key in sorted(keys)]
        cursor.execute(self.sql["claim_keys"].replace("{rows}", ",".join(rows)))
        return [DedupKey(*columns) for columns in cursor.fetchall()]

    def new_ids(self, cursor: Cursor, count: int, step: int) -> Sequence[int]:  # noqa: ARG002
        """See OverPyMySql. The INSERT returns them."""
        return [one for (one,) in cursor.fetchall()]
