"""Sends statements to PostgreSQL all at once, by libpq's pipeline mode.

psycopg's own pipelines send each statement by itself, which costs more than twice the CPU time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import psycopg
from psycopg import adapt
from psycopg.abc import Transformer
from psycopg.pq import ConnStatus, ExecStatus, Format
from psycopg.pq.abc import PGresult

from kmqpy.core.sockets import is_readable, wait_for_either
from kmqpy.storages.sql.dialect import Parameters

Statement = tuple[str, Parameters]
Rows = Sequence[tuple[Any, ...]]
_PLACEHOLDER = re.compile(r"%\((\w+)\)b")
_INT8, _BY_CONTEXT = 20, 0
_LONG_S = 3600.0
_NUMBERS = count(1)  # of statements: a connection may see several pipelines


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A statement that the server has prepared; `rows` knows how its columns are converted."""

    name: bytes
    parameters: Sequence[str]
    rows: Transformer


class Pipeline:
    """The pipelines of one connection, which nothing else may use meanwhile."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        self._server = connection.pgconn
        self._prepared: dict[str, _Prepared] = {}

    def run(self, *transactions: Sequence[Statement]) -> list[Rows]:
        """Execute transactions one after the other; returns the rows of each statement.

        Parameters are numbers and texts. Raises psycopg.Error for the first statement that fails: its
        transaction is rolled back.
        """
        try:
            return self._run(transactions)
        except psycopg.errors.InvalidSqlStatementName:
            # After a rollback psycopg deallocates all prepared statements, so already the first one failed.
            self._prepared.clear()
            return self._run(transactions)

    def _run(self, transactions: Sequence[Sequence[Statement]]) -> list[Rows]:
        self._prepare([*chain.from_iterable(transactions)])
        queries = [[(self._prepared[text], given) for text, given in one] for one in transactions]
        self._server.enter_pipeline_mode()
        for transaction in queries:
            for query, given in transaction:
                values = [str(given[one]).encode() for one in query.parameters]
                self._server.send_query_prepared(query.name, values, result_format=Format.BINARY)
            self._server.pipeline_sync()
        while self._server.flush():
            wait_for_either(self._server.socket)
            self._server.consume_input()
        results = self._results(len(transactions))
        for result in results:
            if result.status not in (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK):
                raise psycopg.errors.error_from_result(result)
        if self._server.status == ConnStatus.BAD:
            raise psycopg.OperationalError(self._server.get_error_message())
        sent = chain.from_iterable(queries)
        return [_rows(query, result) for (query, _), result in zip(sent, results, strict=True)]

    def _results(self, syncs: int) -> list[PGresult]:
        """All results up to so many syncs, or to the end of the connection."""
        results: list[PGresult] = []
        while syncs:
            while self._server.is_busy():
                is_readable(self._server.socket, _LONG_S)
                self._server.consume_input()
            result = self._server.get_result()
            if result is None:  # behind each statement
                if self._server.status == ConnStatus.BAD:
                    return results
            elif result.status == ExecStatus.PIPELINE_SYNC:
                syncs -= 1
            else:
                results.append(result)
        self._server.exit_pipeline_mode()
        return results

    def _prepare(self, statements: Sequence[Statement]) -> None:
        prepared: dict[str, _Prepared] = {}
        for text, given in statements:
            if text in self._prepared:
                continue
            names = [*dict.fromkeys(_PLACEHOLDER.findall(text))]
            numbered = text.replace("%%", "%")
            for number, one in enumerate(names, 1):
                numbered = numbered.replace(f"%({one})b", f"${number}")
            types = [_INT8 if isinstance(given[one], int) else _BY_CONTEXT for one in names]
            name = b"kmqpy_%d" % next(_NUMBERS)
            result = self._server.prepare(name, numbered.encode(), types)
            if result.status != ExecStatus.COMMAND_OK:
                raise psycopg.errors.error_from_result(result)
            prepared[text] = _Prepared(name, names, adapt.Transformer(self._connection))
        self._prepared |= prepared  # all or none, as they are deallocated


def _rows(query: _Prepared, result: PGresult) -> Rows:
    query.rows.set_pgresult(result, set_loaders=query.rows.pgresult is None)
    found: Rows = query.rows.load_rows(0, result.ntuples, tuple)
    result.clear()  # it may be large
    return found
