"""Makes kmqpy/gateway/dialects/sqs/shapes.py of botocore's model of SQS.

    python tests/gateway/sqs_model.py > kmqpy/gateway/dialects/sqs/shapes.py

botocore itself takes 1.2 s to import and a hundred times as long to read a request, so the gateway has none.
"""

import botocore.session

_HEAD = '''\
"""The requests of SQS's actions. Made by tests/gateway/sqs_model.py of botocore's model: change nothing here.

Every field may be missing: SQS has an error of its own for one that is `required`, which __init__.py raises.
"""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct
'''
_END = '''

REQUESTS: dict[str, type[Struct]] = {
    name.removesuffix("Request"): found for name, found in globals().items() if name.endswith("Request")
}
"""The requests by the names of their actions."""
'''
_PLAIN = {"string": "str", "integer": "int", "long": "int", "boolean": "bool", "blob": "bytes"}


def model():
    """botocore's model of SQS."""
    return botocore.session.get_session().get_service_model("sqs")


def text():
    """The module's text."""
    found, parts = {}, [_HEAD]
    sqs = model()
    actions = [name for name in sqs.operation_names if sqs.operation_model(name).input_shape]
    for action in actions:
        _find(sqs.operation_model(action).input_shape, found)
    for shape in found.values():
        required = ", ".join(f'"{name}"' for name in shape.required_members)
        required += "," * (len(shape.required_members) == 1)
        parts.append(
            f"\n\nclass {shape.name}(Struct, frozen=True, gc=False):\n"
            f"    required: ClassVar[tuple[str, ...]] = ({required})\n"
            + "".join(f"    {name}: {_type(one)} | None = None\n" for name, one in shape.members.items())
        )
    parts.append(_END)
    return "".join(parts)


def _find(shape, found):
    """Add the structures of which a shape consists, those first that others need."""
    if shape.type_name == "structure":
        for one in shape.members.values():
            _find(one, found)
        found.setdefault(shape.name, shape)
    elif shape.type_name == "list":
        _find(shape.member, found)
    elif shape.type_name == "map":
        _find(shape.value, found)


def _type(shape):
    match shape.type_name:
        case "structure":
            return shape.name
        case "list":
            return f"list[{_type(shape.member)}]"
        case "map":
            return f"dict[str, {_type(shape.value)}]"
        case plain:
            return _PLAIN[plain]


if __name__ == "__main__":
    print(text(), end="")
