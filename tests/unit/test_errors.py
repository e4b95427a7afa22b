import copy
import importlib
import inspect
import pickle
import pkgutil
import re
from concurrent.futures import ProcessPoolExecutor

import pytest

import kmqpy
import tracker
from kmqpy import errors
from kmqpy.worker.outcome import Reject, Retry

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


def all_errors():
    """All errors of kmqpy that its callers may meet, and those that handlers raise."""
    for package in (kmqpy, tracker):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    found, left = {Reject, Retry}, [errors.KmqError]
    while left:
        cls = left.pop()
        found.add(cls)
        left += cls.__subclasses__()
    return sorted((cls for cls in found if not cls.__module__.startswith("tests")), key=str)


def raised(cls):
    if cls.__init__ is Exception.__init__:
        error = cls("text")
    else:
        needed = [one for one in inspect.signature(cls).parameters.values() if one.default is one.empty]
        error = cls(*(f"text {at}" for at in range(len(needed))))
    error.added = "in a note of the caller"
    return error


def test_every_error_can_be_pickled_and_copied():
    assert len(all_errors()) > 20
    for cls in all_errors():
        error = raised(cls)
        for same in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert type(same) is cls
            assert (str(same), same.args, vars(same)) == (str(error), error.args, vars(error))


def missing():
    raise errors.MissingExtra("sql", "queues in a SQL database")


def test_an_error_reaches_the_parent_of_a_pool():
    with ProcessPoolExecutor(1) as pool, pytest.raises(errors.MissingExtra, match="needs an extra"):
        pool.submit(missing).result(timeout=30)
