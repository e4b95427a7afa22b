"""kmqpy's own code as generators: its source, in which every call that waits is a point to stop at.

`stepwise("tracker.redelivery.redeliverer", {...})` executes the module's source once more after it has made
generators of the named functions; inside these, a call of a named function or of an I/O operation
becomes `(yield from call)`. So the simulation runs the real flow of clients and trackers, line by
line, and can stop, kill or overtake it at each I/O operation. What does the I/O is given by the
simulation, as other values of the module's global names.
"""

import ast
import importlib
import inspect
import sys
import types
from typing import Any

import confluent_kafka

from .model import Record
from .world import Steps

IO = {
    "_write_assignment_ticks",
    "_look_for_topics",
    "begin_transaction",
    "commit_transaction",
    "wait_until_confirmed",
    "abort_transaction",
    "init_transactions",
    "committed",
    "consume",
    "examine",
    "execute",
    "check",
    "fetch",
    "fetch_ahead",
    "find_acknowledged",
    "find_copies",
    "find_cut",
    "find_starts",
    "flush",
    "mend",
    "note_ends",
    "offsets_for_times",
    "open",
    "open_producer",
    "poll",
    "read_at",
    "read_offset",
    "read_between",
    "read_to",
    "receive",
    "recover",
    "redeliver",
    "retrying",
    "scan",
    "scan_since",
    "send_markers",
    "send_tick",
    "serve",
    "decide",
    "sleep",
    "start",
    "verify",
    "wait",
    "watermarks",
    "with_markers_cut_back",
    "write",
}

SOMETIMES_IO = {
    "_cut_since",
    "_markers_cut_since",
    "_markers_since",
    "ask",
    "bounds",
    "cut_back",
    "remove",
    "step",
}
"""Names of functions that wait, and of others."""


def in_steps(result: Any) -> Steps:
    """The result of a call that may or may not wait."""
    return (yield from result) if isinstance(result, types.GeneratorType) else result


def stepwise(module: str, functions: set[str], **names: Any) -> types.ModuleType:
    """A copy of `module` whose `functions` are generators and whose global `names` are replaced."""
    original = importlib.import_module(module)
    tree = ast.parse(inspect.getsource(original))
    rewriter = _Rewriter(functions)
    tree = ast.fix_missing_locations(rewriter.visit(tree))
    if missing := functions - rewriter.found:
        raise AssertionError(f"{module} has no {', '.join(sorted(missing))} any more: adapt the simulation")
    copy = types.ModuleType(f"{__name__}.{module}")
    copy.__file__ = original.__file__
    copy.__dict__["in_steps"] = in_steps
    sys.modules[copy.__name__] = copy
    exec(compile(tree, f"{original.__file__} (stepwise)", "exec"), copy.__dict__)
    for name in names:
        if name not in copy.__dict__:
            raise AssertionError(f"{module} has no {name} any more: adapt the simulation")
    copy.__dict__.update(names)
    for name, value in list(copy.__dict__.items()):
        if value is confluent_kafka.Message:  # whose methods are used without an instance
            copy.__dict__[name] = Record
    return copy


class _Rewriter(ast.NodeTransformer):
    def __init__(self, functions: set[str]) -> None:
        self.functions = functions
        self.found: set[str] = set()
        self._inside = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if node.name not in self.functions:  # within another: a callback, which is called, not waited for
            return node if self._inside else self.generic_visit(node)
        self.found.add(node.name)
        was_inside, self._inside = self._inside, True
        self.generic_visit(node)
        self._inside = was_inside
        # A generator even where nothing in it waits.
        never = ast.parse("if False: yield").body
        doc = 1 if ast.get_docstring(node) is not None else 0
        node.body[doc:doc] = never
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not self._inside:
            return node
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in SOMETIMES_IO:
            return ast.YieldFrom(ast.Call(ast.Name("in_steps", ast.Load()), [node], []))
        return ast.YieldFrom(node) if called in self.functions | IO else node
