"""What the pipeline does to frames of messages; no Spark is started."""

import pandas as pd
import pytest

from kmqpy.spark.json_rows import PassBodies
from kmqpy.spark.sinks.origin import WithOrigin


def messages(*bodies):
    count = len(bodies)
    partitions, offsets = [3] * count, range(100, 100 + count)
    frame = pd.DataFrame(
        {
            "value": bodies,
            "partition": partitions,
            "offset": offsets,
            "original_partition": partitions,
            "original_offset": offsets,
        }
    )
    return frame.rename_axis("kmq_row")


def test_bodies_that_are_refused_are_rejected():
    found = PassBodies()(messages(b"{}", b"broken").assign(refused=[None, "not a JSON object"]))
    assert found["value"].tolist() == [b"{}", b"broken"]
    assert found["kmq_reject"].tolist() == [False, True]
    assert found["kmq_error"].tolist() == [None, "not a JSON object"]


def test_copies_are_told_from_first_messages():
    found = WithOrigin(lambda frame: frame[["value"]])(messages("a", "b").assign(offset=[100, 500]))
    assert found["original_copied"].tolist() == [False, True]
    found = WithOrigin(lambda frame: frame[["value"]])(messages("a").assign(partition=4))
    assert found["original_copied"].tolist() == [True]


def test_every_row_is_told_apart():
    twice = WithOrigin(lambda frame: frame.loc[[1, 0, 1], ["value"]])
    found = twice(messages("a", "b"))
    columns = ["value", "original_partition", "original_offset", "original_row"]
    assert found[columns].values.tolist() == [["b", 3, 101, 0], ["a", 3, 100, 0], ["b", 3, 101, 1]]


def test_when_all_have_failed_the_columns_are_there():
    found = WithOrigin(lambda _: pd.DataFrame(columns=["id"]))(messages("a"))
    assert found.columns.tolist() == [
        "id",
        "original_partition",
        "original_offset",
        "original_row",
        "original_copied",
    ]


def test_the_function_may_change_the_frame():
    found = WithOrigin(lambda frame: frame.assign(original_offset=0))(messages("a"))
    assert found["original_offset"].tolist() == [100]

    def in_place(frame):
        frame["original_offset"] = 0
        return frame

    assert WithOrigin(in_place)(messages("a"))["original_offset"].tolist() == [100]


@pytest.mark.parametrize("wrong", [None, pd.DataFrame({"x": [1]})])
def test_what_process_refuses_is_left_to_it(wrong):
    assert WithOrigin(lambda _: wrong)(messages("a")) is wrong
