"""The command `kmq sql schema`."""

from __future__ import annotations

import click

from kmqpy.cli.options import Group
from kmqpy.storages.sql.statements import DIALECTS, Names, script
from kmqpy.storages.sql.tables import DialectName


@click.group(cls=Group)
def sql() -> None:
    """For queues in a SQL database.

    \b
    Example:
      kmq sql schema --dialect postgresql
    """


@sql.command()
@click.option("--dialect", type=click.Choice(DIALECTS), required=True, help="Which database.")
@click.option("--prefix", default="kmq_", show_default=True, help="Beginning of the tables' names.")
@click.option(
    "--schema", "schema_name", default="", metavar="NAME", help="Schema of the tables (postgresql)."
)
def schema(dialect: DialectName, prefix: str, schema_name: str) -> None:
    """Print the statements that create the tables.

    Opening a storage creates them; these are for accounts that may not.

    \b
    Example:
      kmq sql schema --dialect postgresql | psql mydatabase
    """
    click.echo(script(dialect, Names.of(dialect, {"prefix": prefix, "schema": schema_name})), nl=False)
