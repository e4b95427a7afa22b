"""Sends statements to PostgreSQL all at once, by libpq's pipeline mode.

psycopg's own pipelines send each statement by itself, which costs more than twice the CPU time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import psycopg
from psycopg import adapt
from psycopg.abc import Transformer
from psycopg.pq import ConnStatus, DiagnosticField, ExecStatus, Format, PipelineStatus
from psycopg.pq.abc import PGresult

from kmqpy.core.sockets import is_readable, wait_for_either
from kmqpy.storages.sql.dialect import Parameters

Statement = tuple[str, Parameters]
Rows = Sequence[tuple[Any, ...]]
_PLACEHOLDER = re.compile(r"%\((\w+)\)b")
_INT8, _BY_CONTEXT = 20, 0
_LONG_S, _CANCEL_S = 3600.0, 2.0
_NUMBERS = count(1)  # of statements: no two of a connection have one


@dataclass(slots=True)
class _Query:
    """A statement in the form of libpq; `rows` knows how its columns are converted."""

    name: bytes
    text: bytes
    parameters: Sequence[str]
    types: Sequence[int]
    rows: Transformer
    is_prepared: bool = False


class _Sent(NamedTuple):
    """What the server will return a result of."""

    transaction: int
    query: _Query
    is_prepare: bool


class Pipeline:
    """The pipelines of one connection, which nothing else may use meanwhile."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        self._server = connection.pgconn
        self._encoding = connection.info.encoding
        self._queries: dict[str, _Query] = {}

    def run(self, *transactions: Sequence[Statement]) -> list[Rows]:
        """Execute transactions one after the other; returns the rows of each statement.

        Parameters are numbers and texts in ASCII. Raises psycopg.Error for the first statement that fails;
        its transaction is rolled back, and no other one. After any other exception, which may come in
        between, the server's work is cancelled and the connection closed.
        """
        try:
            return self._run(transactions)
        except _NothingDone:
            return self._run(transactions)

    def _run(self, transactions: Sequence[Sequence[Statement]]) -> list[Rows]:
        queries = [[(self._query(text, given), given) for text, given in one] for one in transactions]
        sent: list[_Sent] = []
        with self._in_pipeline_mode():
            for number, transaction in enumerate(queries):
                for query, given in transaction:
                    sent += self._send(number, query, given)
                self._server.pipeline_sync()
            while self._server.flush():
                wait_for_either(self._server.socket)
                self._server.consume_input()
            results = self._results(len(queries))
        return self._rows(sent, results)

    @contextmanager
    def _in_pipeline_mode(self) -> Iterator[None]:
        try:
            self._server.enter_pipeline_mode()
            yield
            if self._server.status == ConnStatus.OK:
                self._server.exit_pipeline_mode()
        except BaseException:
            if self._server.pipeline_status != PipelineStatus.OFF:  # who came next would get these results
                try:
                    with suppress(Exception):
                        self._connection.cancel_safe(timeout=_CANCEL_S)
                finally:
                    self._connection.close()
            raise

    def _query(self, text: str, given: Parameters) -> _Query:
        found = self._queries.get(text)
        if found is None:
            names = [*dict.fromkeys(_PLACEHOLDER.findall(text))]
            numbered = text.replace("%%", "%")
            for number, one in enumerate(names, 1):
                numbered = numbered.replace(f"%({one})b", f"${number}")
            types = [_INT8 if isinstance(given[one], int) else _BY_CONTEXT for one in names]
            name, rows = f"kmqpy_{next(_NUMBERS)}", adapt.Transformer(self._connection)
            found = _Query(name.encode(), numbered.encode("ascii"), names, types, rows)
            self._queries[text] = found
        return found

    def _send(self, transaction: int, query: _Query, given: Parameters) -> Iterator[_Sent]:
        if not query.is_prepared:
            self._server.send_prepare(query.name, query.text, query.types)
            query.is_prepared = True
            yield _Sent(transaction, query, is_prepare=True)
        values = [str(given[one]).encode("ascii") for one in query.parameters]
        self._server.send_query_prepared(query.name, values, result_format=Format.BINARY)
        yield _Sent(transaction, query, is_prepare=False)

    def _results(self, syncs: int) -> list[PGresult]:
        """The results up to so many syncs, or to the end of the connection."""
        results: list[PGresult] = []
        while syncs:
            while self._server.is_busy():
                is_readable(self._server.socket, _LONG_S)
                self._server.consume_input()
            result = self._server.get_result()
            if result is None:  # behind each statement
                if self._server.status == ConnStatus.BAD:
                    break
            elif result.status == ExecStatus.PIPELINE_SYNC:
                syncs -= 1
            else:
                results.append(result)
        return results

    def _rows(self, sent: Sequence[_Sent], results: Sequence[PGresult]) -> list[Rows]:
        for one, result in zip(sent, results, strict=False):
            if one.is_prepare and result.status != ExecStatus.COMMAND_OK:
                one.query.is_prepared = False
        for one, result in zip(sent, results, strict=False):
            if result.status in (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK):
                continue
            error = self._error(result)
            if isinstance(error, psycopg.errors.InvalidSqlStatementName):
                self._queries.clear()  # psycopg deallocates all after some errors, as poolers may
                if one.transaction == 0:
                    raise _NothingDone from error
            raise error
        if self._server.status == ConnStatus.BAD:
            raise psycopg.OperationalError(self._server.get_error_message(self._encoding))
        found = zip(sent, results, strict=True)
        return [_rows(one.query, result) for one, result in found if not one.is_prepare]

    def _error(self, result: PGresult) -> psycopg.Error:
        if result.error_field(DiagnosticField.SQLSTATE):
            return psycopg.errors.error_from_result(result, self._encoding)
        return psycopg.OperationalError(result.get_error_message(self._encoding))  # the connection has ended


class _NothingDone(Exception):
    """Nothing of a pipeline was committed: what it needs is to be prepared anew."""


def _rows(query: _Query, result: PGresult) -> Rows:
    query.rows.set_pgresult(result, set_loaders=query.rows.pgresult is None)
    found: Rows = query.rows.load_rows(0, result.ntuples, tuple)
    result.clear()  # it may be large
    return found
