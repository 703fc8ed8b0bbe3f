"""Which bytes are hashed for which promise: each input is computed here a second time, by hand."""

import hashlib
import hmac
import struct

import pytest

from provenance.integrity import digests

SEED, KEY = bytes(range(32)), bytes(range(32, 64))


def test_a_salt_is_derived_from_seed_role_row_and_index() -> None:
    place = b"provenance/salt/v1" + struct.pack("<HII", 16, 3, 65537)
    assert digests.salt(SEED, 16, 3, 65537) == hmac.digest(SEED, place, "sha256")


@pytest.mark.parametrize("other", [(KEY, 1, 2, 3), (SEED, 2, 2, 3), (SEED, 1, 3, 3), (SEED, 1, 2, 4), (SEED, 1, 3, 2)])
def test_no_two_payloads_share_a_salt(other: tuple[bytes, int, int, int]) -> None:
    assert digests.salt(*other) != digests.salt(SEED, 1, 2, 3)


def test_a_commitment_binds_salt_and_payload() -> None:
    value = digests.commitment(SEED, b"payload")
    assert value == hashlib.sha256(b"provenance/commit/v1" + SEED + b"payload").digest()
    assert len({value, digests.commitment(KEY, b"payload"), digests.commitment(SEED, b"payloae")}) == 3


def test_an_equality_key_is_keyed_tagged_and_measured() -> None:
    framed = b"\x02ab" + struct.pack("<Q", 1) + b"x" + struct.pack("<Q", 0)
    assert digests.equality(KEY, "ab", (b"x", b"")) == hmac.digest(KEY, b"provenance/equal/v1" + framed, "sha256")


@pytest.mark.parametrize(
    ("kind", "parts", "key"),
    [("k", (b"a", b"bc"), KEY), ("k", (b"abc",), KEY), ("k", (b"ab", b"c", b""), KEY), ("k", (b"c", b"ab"), KEY),
     ("l", (b"ab", b"c"), KEY), ("k", (b"ab", b"c"), SEED)],
)  # fmt: skip
def test_only_equal_parts_of_one_kind_under_one_key_are_equal(kind: str, parts: tuple[bytes, ...], key: bytes) -> None:
    assert digests.equality(key, kind, parts) != digests.equality(KEY, "k", (b"ab", b"c"))
    assert digests.equality(key, kind, parts) == digests.equality(key, kind, tuple(parts))


def test_a_body_has_another_name_under_another_key() -> None:
    assert digests.body_key(KEY, b"body") == hmac.digest(KEY, b"provenance/body/v1body", "sha256")
    assert digests.body_key(KEY, b"body") != digests.body_key(SEED, b"body")
    assert digests.body_key(KEY, b"body") != digests.equality(KEY, "", (b"body",))


def test_a_key_is_named_by_16_digits_that_do_not_tell_it() -> None:
    name = digests.key_id(KEY)
    assert name == hashlib.sha256(b"provenance/key-id/v1" + KEY).hexdigest()[:16]
    assert name not in KEY.hex()
    assert name != digests.key_id(SEED)


def test_a_leaf_is_hashed_as_rfc_9162_does() -> None:
    # The leaf hash of the empty entry, from the test vectors of Certificate Transparency.
    assert digests.leaf_hash(b"").hex() == "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"
    assert digests.leaf_hash(b"leaf") == hashlib.sha256(b"\0leaf").digest()


def test_a_file_digest_is_what_other_tools_print() -> None:
    assert digests.file_digest(b"abc") == "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
