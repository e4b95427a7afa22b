"""What take() says of the rows of a batch, and what the driver makes of rows that are not ok. Pure."""

import json

import numpy as np
import pytest

from kmqpy.errors import DecodeError
from kmqpy.spark.take import FailedMessage, _column, failed_messages


@pytest.mark.parametrize(
    ("rows", "column"),
    [
        ([True], ["+{}"]),
        ([False], ["-{}"]),
        ([True, True, True], [None, None, "+{}"]),
        ([False, True, False], ["-", None, "-{}"]),
        ([False, True], ["-", "+{}"]),
    ],
)
def test_the_report_stands_in_the_last_row(rows, column):
    assert _column(np.array(rows), "{}").to_pylist() == column


def failure(**fields):
    return json.dumps({"partition": 1, "offset": 2**40, "attempts": 3, **fields})


def test_a_message_has_failed_once_however_many_of_its_rows_have():
    found = failed_messages([failure(reason="odd"), failure(reason="other"), failure(offset=7)])
    assert found == {
        (1, 2**40): FailedMessage(attempts=3, reason="odd"),
        (1, 7): FailedMessage(attempts=3, reason=None),
    }


@pytest.mark.parametrize("text", ["", "[]", "5", '{"reason": "no message"}', failure(partition=None)])
def test_a_failed_row_of_no_message_is_an_error(text):
    with pytest.raises(DecodeError, match="does not say of which message"):
        failed_messages([text])
