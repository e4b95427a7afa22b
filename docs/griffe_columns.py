"""An extension of griffe: columns of a docstring keep their lines on the page of the API.

Docstrings are plain text. What is written there in columns, a name and what it means, or a tree, would run
together as a paragraph of Markdown.
"""

import re
from typing import Any

from griffe import Extension, Object

_COLUMNS = re.compile(r"\S {2,}\S|[├└]──")


class Columns(Extension):
    """Makes paragraphs that have columns blocks of code."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of an object, if it has one."""
        if obj.docstring:
            obj.docstring.value = "\n\n".join(map(_as_code, obj.docstring.value.split("\n\n")))


def _as_code(paragraph: str) -> str:
    if paragraph.startswith("    ") or not _COLUMNS.search(paragraph):
        return paragraph
    return "\n".join(f"    {line}" for line in paragraph.splitlines())
