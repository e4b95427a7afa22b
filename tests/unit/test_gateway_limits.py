"""Bodies of requests, shares of the memory, rates."""

import asyncio
import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmqpy.gateway.limits import BadEncoding, Held, Overloaded, Rate, Share, TooLarge, read_body
from kmqpy.testing import ManualClock


def body_of(chunks, encoding="", most=1_000, held=10_000):
    async def main():
        async def source():
            for chunk in chunks:
                yield chunk

        return await read_body(source(), encoding, Share(Held(held)), most)

    return asyncio.run(main())


@given(st.binary(max_size=900), st.integers(1, 50))
def test_bodies_are_read_plain_and_compressed(body, size):
    packed = gzip.compress(body)
    assert body_of([body[at : at + size] for at in range(0, len(body), size)]) == body
    assert body_of([packed[at : at + size] for at in range(0, len(packed), size)], "gzip") == body
    assert body_of([packed], "GZIP, identity") == body
    assert body_of([packed + packed[:7], packed[7:]], "gzip", most=1_800) == body + body


def test_bodies_that_are_too_large_or_no_gzip_are_refused():
    bomb = gzip.compress(bytes(50_000_000))
    with pytest.raises(TooLarge):
        body_of([bomb], "gzip")
    with pytest.raises(TooLarge):
        body_of([b"x" * 1_001])
    assert body_of([b"x" * 1_000]) == b"x" * 1_000
    with pytest.raises(Overloaded):
        body_of([b"x" * 900], held=800)
    packed = gzip.compress(b"hello")
    for bad in (
        b"hello",
        packed[:-3],
        packed[:5],
        packed + b"more",
        zlib.compress(b"hello"),
    ):
        with pytest.raises(BadEncoding):
            body_of([bad], "gzip")
    for encoding in ("br", "gzip, gzip", "deflate"):
        with pytest.raises(BadEncoding):
            body_of([packed], encoding)


def test_a_share_is_given_back_as_a_whole():
    everybody, key = Held(100), Held(50)
    share = Share(everybody)
    share.join(key)
    share.add(50)
    with pytest.raises(Overloaded):
        share.add(1)
    with pytest.raises(Overloaded):
        share.add(0)  # nothing has room for what is to come
    assert (everybody.count, key.count) == (50, 50)
    share.close()
    share.close()
    assert (everybody.count, key.count) == (0, 0)


def test_a_rate_allows_a_burst_of_one_second():
    clock = ManualClock()
    rate = Rate(10, clock)
    assert [rate.spend(1) for _ in range(10)] == [0.0] * 10
    assert rate.spend(1) > 0
    clock.advance(0.1)
    assert rate.spend(1) == 0
    clock.advance(60)
    assert [rate.spend(1) for _ in range(10)] == [0.0] * 10
    assert rate.spend(1) > 0
