"""Docstrings of what docs/api.md names show each parameter, so that editors and the page do."""

import enum
import importlib
import inspect
import re
from pathlib import Path

import pytest

NAMES = re.findall(r"^::: (\S+)$", (Path(__file__).parents[2] / "docs/api.md").read_text(), re.MULTILINE)
MADE_BY_KMQPY = {
    "DeadItems",
    "DistributedDelayQueue",
    "DistributedIdQueue",
    "DistributedPriorityQueue",
    "DistributedQueue",
    "KafkaMessage",
    "MessageConsumer",
    "Transaction",
}
"""Users call no constructors of these."""


def object_of(name):
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


NAMES.remove("kmqpy.errors")
DOCUMENTED = {object_of(name).__name__: object_of(name) for name in NAMES}


def listed(docstring):
    """The names in the sections Args and Attributes."""
    text = inspect.cleandoc(docstring or "")
    sections = re.findall(r"^(?:Args|Attributes):\n((?:(?: .*)?\n?)*)", text, re.MULTILINE)
    return {name for one in sections for name in re.findall(r"^    (\w+): \S", one, re.MULTILINE)}


def shown(cls, method):
    """What a method's docstring lists, those of base classes, and that to which it refers (`See Queue`)."""
    found = set()
    for one in cls.__mro__:
        docstring = (vars(one).get(method) or inspect).__doc__ if method in vars(one) else None
        found |= listed(docstring)
        if refers := re.match(r"See (\w+)", docstring or ""):
            found |= listed(getattr(DOCUMENTED[refers[1]], method).__doc__)
    return found


def parameters(function):
    return [name for name in inspect.signature(function).parameters if name != "self" and name[0] != "_"]


def missing(thing):
    """Parameters of a function, or of a class and its public methods, that no docstring shows."""
    if not inspect.isclass(thing):
        return [name for name in parameters(thing) if name not in listed(thing.__doc__)]
    found = []
    not_called = issubclass(thing, enum.Enum) or getattr(thing, "_is_protocol", False)
    if thing.__name__ not in MADE_BY_KMQPY and not not_called:
        made_by = thing.__init__ if hasattr(thing, "__dataclass_fields__") else thing
        there = {name for one in thing.__mro__ if one is not object for name in listed(one.__doc__)}
        found += [name for name in parameters(made_by) if name not in there]
    for method in dir(thing):
        function = inspect.unwrap(getattr(thing, method))
        if method.startswith("_") or method in getattr(thing, "__dataclass_fields__", {}):
            continue
        if inspect.isfunction(function) and function.__module__.startswith(("kmqpy", "tracker")):
            there = shown(thing, method)
            found += [f"{method}: {name}" for name in parameters(function) if name not in there]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_each_parameter_is_shown(name):
    assert missing(object_of(name)) == []


def test_a_parameter_that_is_not_shown_is_found():
    def call(queue, limit):
        """Do it.

        Args:
            queue: Its name.

        Raises:
            limit: Not a parameter here.
        """

    assert missing(call) == ["limit"]
