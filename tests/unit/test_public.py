"""The public surface of the package."""

import kmqpy


def test_all_names_are_there_and_nothing_else_is_public() -> None:
    assert kmqpy.__all__ == sorted(kmqpy.__all__)
    assert len(kmqpy.__all__) <= 25
    for name in kmqpy.__all__:
        thing = getattr(kmqpy, name)
        assert (thing.__doc__ or "").strip(), f"{name} has no docstring"
