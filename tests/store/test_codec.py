"""Bodies in the store: what comes out is what went in, and damaged or swollen bytes are refused."""

import random
import sys

import pytest

from provenance.facts import BUFFER, OCTETS, TEXT, VALUE
from provenance.integrity import buffers
from provenance.store import codec
from provenance.store.codec import PLANES, RAW, SMALL, ZSTD, pack, unpack

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

TEXTS = b"the same words again and again, " * 40
CHANCE = random.Random(1)
IDS = buffers.ids([CHANCE.randrange(50_000) for _ in range(500)])
NOISE = CHANCE.randbytes(5000)


@pytest.mark.parametrize("encoding", [TEXT, BUFFER, VALUE, OCTETS])
@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, SMALL - 1, SMALL, SMALL + 1, 1001, 4096])
def test_a_body_of_any_length_comes_back(encoding: int, size: int) -> None:
    for data in ((TEXTS * 4)[:size], NOISE[:size]):
        number, stored = pack(data, encoding)
        assert unpack(number, stored, len(data)) == data


@pytest.mark.parametrize(
    ("data", "encoding", "number"),
    [
        (b"x" * (SMALL - 1), TEXT, RAW),
        (TEXTS, TEXT, ZSTD),
        (IDS, BUFFER, PLANES),
        (NOISE, TEXT, RAW),
        (NOISE, OCTETS, RAW),
    ],
    ids=["small", "text", "ids", "noise", "noise octets"],
)
def test_a_body_is_stored_in_the_form_that_is_smaller(data: bytes, encoding: int, number: int) -> None:
    chosen, stored = pack(data, encoding)
    assert chosen == number
    assert len(stored) <= len(data)


def test_ids_shrink_more_as_planes_than_as_they_are() -> None:
    assert len(pack(IDS, BUFFER)[1]) < len(pack(IDS, TEXT)[1])
    assert len(pack(IDS, BUFFER)[1]) < 0.6 * len(IDS)


def test_the_numbers_of_codecs_never_change() -> None:
    assert codec.KINDS == {
        0: "raw",
        1: "zstd",
        2: "zstd with dictionary",
        3: "zstd of 4 byte planes",
        4: "blob by SHA-256",
    }


@pytest.mark.parametrize("size", [0, len(TEXTS) - 1, len(TEXTS) + 1, 2**40])
@pytest.mark.parametrize("number", [RAW, ZSTD, PLANES])
def test_a_body_of_another_size_is_refused(number: int, size: int) -> None:
    stored = TEXTS if number == RAW else zstd.compress(TEXTS, 3)
    with pytest.raises(ValueError, match="a body of"):
        unpack(number, stored, size)


def test_a_swollen_body_is_refused_before_it_swells() -> None:
    bomb = zstd.compress(bytes(256 << 20), 3)
    assert len(bomb) < 1 << 16
    with pytest.raises(ValueError, match="a body of 11 bytes where 10 were stored"):
        unpack(ZSTD, bomb, 10)


def test_one_compressor_packs_many_bodies_each_as_if_it_were_the_first() -> None:
    tool = codec.compressor()
    for body, encoding in [(b"the quick brown fox " * n, TEXT) for n in (200, 5, 77)] + [(IDS, BUFFER)]:
        assert pack(body, encoding, tool) == pack(body, encoding)
        assert unpack(*pack(body, encoding, tool), len(body)) == body


def test_damaged_bytes_are_refused() -> None:
    number, stored = pack(TEXTS, TEXT)
    for damaged in (
        b"",
        stored[:-1],
        stored[: len(stored) // 2],
        b"\0" * len(stored),
        b"text that is no frame at all" * 9,
    ):
        with pytest.raises(ValueError):
            unpack(number, damaged, len(TEXTS))


@pytest.mark.parametrize("number", [2, 4, 255, -1])
def test_a_codec_of_a_later_version_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match=f"codec {number} is not known"):
        unpack(number, b"", 0)
