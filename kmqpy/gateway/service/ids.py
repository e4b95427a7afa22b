"""Ids of messages as clients of the gateway see them. Pure: no I/O.

The hex digits of: a digest of the queue's unique id (8 bytes), the message's id, and a CRC-32 (4 bytes)
of the queue's name and all before. So an id tells which queue of which storage it is from. A message's id is
8 bytes: a whole number, or on Kafka the bits 10, the partition in 14 bits and the number in 48. A larger
place is 12 bytes (4 and 8), and any other text follows a byte 255.
"""

from __future__ import annotations

import hashlib
import struct
import zlib

from kmqpy.core.int64 import INT64_MAX
from kmqpy.errors import ReceiptError

_DIGEST_BYTES = 8
_CHECKSUM = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")
_PLACE = struct.Struct(">IQ")
_SHORT_PLACE = 1 << 63
_NUMBER_BITS = 48
_PARTITION_BITS = 14
_TEXT = b"\xff"
"""Nothing else begins so: the first bit of numbers and long places is 0, the second of short ones is."""
_MIN_BYTES = _DIGEST_BYTES + 1 + _CHECKSUM.size


class InvalidId(ReceiptError):
    """A text is no id of a message."""


class InvalidChecksum(InvalidId):
    """An id is damaged, or one of another queue."""


class WireIds:
    """Makes and reads the ids of the messages of one queue.

    name       the queue's name in the storage
    unique_id  the queue's Queue.unique_id; None if the queue does not exist (yet)
    """

    def __init__(self, name: str, unique_id: str | None) -> None:
        self._seed = zlib.crc32(name.encode())
        self._digest = (
            b""
            if unique_id is None
            else hashlib.blake2b(unique_id.encode(), digest_size=_DIGEST_BYTES).digest()
        )

    def make(self, message_id: str) -> str:
        """The id for clients of the message that the storage calls `message_id`."""
        content = self._digest + _packed(message_id)
        return (content + self._checksum(content)).hex()

    def parse(self, text: object) -> str | None:
        """The reverse of make(); None for an id of an earlier queue of this name, whose messages are gone.

        Raises InvalidId, or InvalidChecksum for an id of another queue.
        """
        if not isinstance(text, str) or not text.isascii():
            raise InvalidId("id: not a text of hex digits")
        try:
            found = bytes.fromhex(text)
        except ValueError:
            raise InvalidId("id: not a text of hex digits") from None
        if len(found) < _MIN_BYTES or 2 * len(found) != len(text):  # fromhex() allows spaces
            raise InvalidId("id: it has the wrong length")
        content, checksum = found[: -_CHECKSUM.size], found[-_CHECKSUM.size :]
        if checksum != self._checksum(content):
            raise InvalidChecksum("id: it is damaged, or one of another queue")
        message_id = _unpacked(content[_DIGEST_BYTES:])
        return message_id if content[:_DIGEST_BYTES] == self._digest else None

    def _checksum(self, content: bytes) -> bytes:
        return _CHECKSUM.pack(zlib.crc32(content, self._seed))


def _packed(message_id: str) -> bytes:
    try:
        numbers = [*map(int, message_id.split("-"))]
    except ValueError:
        numbers = []
    if numbers and "-".join(map(str, numbers)) == message_id:
        match numbers:
            case [number] if number <= INT64_MAX:
                return _NUMBER.pack(number)
            case [partition, number] if partition < 1 << _PARTITION_BITS and number < 1 << _NUMBER_BITS:
                return _NUMBER.pack(_SHORT_PLACE | partition << _NUMBER_BITS | number)
            case [partition, number] if partition < 2**31 and number <= INT64_MAX:
                return _PLACE.pack(partition, number)
    return _TEXT + message_id.encode()


def _unpacked(packed: bytes) -> str:
    if packed[:1] == _TEXT:
        try:
            return packed[1:].decode()
        except UnicodeDecodeError:
            raise InvalidId("id: not a text") from None
    if len(packed) == _NUMBER.size:
        (number,) = _NUMBER.unpack(packed)
        if number < _SHORT_PLACE:
            return str(number)
        partition, number = divmod(number - _SHORT_PLACE, 1 << _NUMBER_BITS)
        return f"{partition}-{number}"
    if len(packed) == _PLACE.size:
        return "{}-{}".format(*_PLACE.unpack(packed))
    raise InvalidId("id: it has the wrong length")
