"""What the pipeline does to frames of messages; no Spark is started."""

import pandas as pd
import pytest

from kmqpy.spark.pipeline import JsonFields, WithOrigin


def messages(*bodies):
    count = len(bodies)
    frame = pd.DataFrame(
        {"value": bodies, "original_partition": [3] * count, "original_offset": range(100, 100 + count)}
    )
    return frame.rename_axis("kmq_row")


def test_fields_of_json_objects():
    found = JsonFields(["id", "name"])(messages(b'{"id": 1, "name": "a", "x": 0}', b'{"id": null}'))
    assert found[["id", "name"]].values.tolist() == [[1, "a"], [None, None]]
    assert found["kmq_error"].tolist() == [None, None]
    assert not found["kmq_reject"].any()
    assert found.index.name == "kmq_row"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{", "not JSON: "),
        (b"\xff", "not JSON: "),
        (None, "not JSON: "),
        (b"[1]", "not a JSON object but list"),
        (b"null", "not a JSON object but NoneType"),
        (b"[" * 100_000, "not JSON: "),
    ],
)
def test_bodies_that_are_no_json_objects_are_rejected(body, expected):
    found = JsonFields(["id"])(messages(b'{"id": 1}', body))
    assert found["kmq_reject"].tolist() == [False, True]
    assert found["kmq_error"][1].startswith(expected)


def test_every_row_is_told_apart():
    twice = WithOrigin(lambda frame: frame.loc[[1, 0, 1], ["value"]])
    found = twice(messages("a", "b"))
    columns = ["value", "original_partition", "original_offset", "original_row"]
    assert found[columns].values.tolist() == [["b", 3, 101, 0], ["a", 3, 100, 0], ["b", 3, 101, 1]]


def test_when_all_have_failed_the_columns_are_there():
    found = WithOrigin(lambda _: pd.DataFrame(columns=["id"]))(messages("a"))
    assert found.columns.tolist() == ["id", "original_partition", "original_offset", "original_row"]


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
