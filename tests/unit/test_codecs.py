"""Codecs that two functions make."""

import datetime as dt
import json
from ssl import SSLError
from traceback import format_exception

import pytest

from kmqpy import storage_for
from kmqpy.errors import DecodeError, MessageError, Unavailable
from kmqpy.queue.codecs import FunctionCodec, JsonCodec

SECRET = "4711"


def refuse(value):
    raise ValueError(f"{SECRET} is wrong")


def logged(error):
    return "".join(format_exception(error))


@pytest.fixture
def queue():
    with storage_for("memory:") as storage:
        storage.create("codecs")
        yield lambda to_body, from_body: storage.open("codecs", codec=FunctionCodec(to_body, from_body))
        storage.delete("codecs")


def test_objects_become_bodies_and_back(queue):
    typed = queue(lambda value: json.dumps(value).encode(), json.loads)
    typed.send({"id": 5})
    (message,) = typed.receive()
    assert typed.decode(message) == {"id": 5}


@pytest.mark.parametrize("to_body", [refuse, lambda value: None, str])
def test_what_makes_no_body_is_not_sent(queue, to_body):
    typed = queue(to_body, json.loads)
    with pytest.raises(MessageError, match=r"^body: the codec ") as error:
        typed.send(SECRET)
    assert SECRET not in logged(error.value)
    assert typed.size() == 0


def test_a_body_that_is_refused_is_kept_with_the_error_and_not_shown(queue):
    typed = queue(bytes, refuse)
    typed.send(SECRET.encode())
    (message,) = typed.receive()
    with pytest.raises(DecodeError, match=r"^body: the codec can't decode it: ValueError$") as error:
        typed.decode(message)
    assert error.value.data == SECRET.encode()
    assert SECRET not in logged(error.value)


class RegistryError(Exception):
    pass


def fail_in_a_circle(_):
    error, other = KeyError("a"), KeyError("b")
    error.__cause__, other.__cause__ = other, error
    raise error


def fail_as_a_message(_):
    raise MessageError("of a body")


@pytest.mark.parametrize("fail", [fail_in_a_circle, fail_as_a_message])
def test_what_the_caller_was_handling_makes_no_body_unavailable(fail):
    codec = FunctionCodec(fail, fail)
    try:
        raise ConnectionError("of the caller")
    except ConnectionError:
        with pytest.raises((KeyError, MessageError)):
            codec.encode("x")
        with pytest.raises(DecodeError):
            codec.decode(b"x")


@pytest.mark.parametrize(
    "error",
    [TimeoutError(SECRET), RegistryError(SECRET), ConnectionRefusedError(111, SECRET), SSLError(1, SECRET)],
)
@pytest.mark.parametrize("is_cause", [False, True])
def test_what_a_codec_can_not_reach_says_nothing_of_the_body(error, is_cause):
    def ask(_):
        if not is_cause:
            raise error
        try:
            raise error
        except type(error):
            raise KeyError("as httpx hides what its sockets raise") from None

    codec = FunctionCodec(ask, ask, unavailable=(RegistryError,))
    with storage_for("memory:") as storage:
        storage.create("away")
        queue = storage.open("away", codec=codec)
        with pytest.raises(Unavailable) as sent:
            queue.send("x")
        storage.open("away").send("x")
        (message,) = queue.receive()
        with pytest.raises(Unavailable) as decoded:
            queue.decode(message)
        storage.delete("away")
    assert SECRET not in logged(sent.value) + logged(decoded.value)


def test_what_has_no_json_is_named_by_its_type_and_not_shown():
    with pytest.raises(MessageError, match=r"of type dict has no form in JSON: .* date ") as caught:
        JsonCodec().encode({SECRET: dt.date(2026, 1, 1)})
    assert SECRET not in logged(caught.value)


def test_an_error_of_the_object_itself_is_not_shown():
    class Sly(dict):
        def items(self):
            raise TypeError(SECRET)

    with pytest.raises(MessageError, match="of type Sly has no form in JSON: TypeError") as caught:
        JsonCodec().encode(Sly(a=1))
    assert SECRET not in logged(caught.value)
