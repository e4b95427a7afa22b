import re

import pytest

from kmqpy import errors

_ENTRY = re.compile(r"^(?P<rails>[│ ]*)[├└]── (?P<name>\w+) ")


def documented_tree() -> dict[str, str]:
    """Child to parent, as the drawing in the module docstring says."""
    assert errors.__doc__ is not None
    tree: dict[str, str] = {}
    path = ["KmqError"]
    for line in errors.__doc__.splitlines():
        if entry := _ENTRY.match(line):
            depth = len(entry["rails"]) // 4 + 1
            path = [*path[:depth], entry["name"]]
            tree[entry["name"]] = path[depth - 1]
    return tree


def test_the_documented_tree_is_the_tree():
    classes = {
        name: cls
        for name, cls in vars(errors).items()
        if isinstance(cls, type) and issubclass(cls, errors.KmqError) and cls is not errors.KmqError
    }
    assert documented_tree() == {name: cls.__base__.__name__ for name, cls in classes.items()}
    assert "KmqError\n" in errors.__doc__


def test_decode_error_carries_the_bytes_but_does_not_print_them():
    error = errors.DecodeError("what is wrong", b"secret-bytes")
    assert error.data == b"secret-bytes"
    assert str(error) == "what is wrong"
    assert errors.DecodeError("nothing there").data is None


def test_missing_extra_says_what_to_run():
    assert str(errors.MissingExtra("dev", "kmq dev up")) == (
        'kmq dev up needs an extra; run: pip install "kmqpy[dev]" (in a clone: ".[dev]")'
    )


@pytest.mark.parametrize("cls", [errors.UnsupportedMarker, errors.QueueNotFound])
def test_the_special_case_is_caught_with_the_general_one(cls):
    with pytest.raises(cls.__base__):
        raise cls("x")
