"""Commitments, equality keys and leaves: which bytes are hashed for which promise.

A *commitment* binds the log to a payload without telling it: SHA-256 over a tag, a salt of 32 random bytes and
the payload. It goes into the leaf. The salt is derived from one random seed in the frame, so that draining a
frame twice gives the same leaf; it lies beside the payload in the store and is erased with it.

An *equality key* says that two payloads are equal, without telling which: HMAC under the key of the store. It
never enters a leaf, and destroying the key ends every link.

A *leaf hash* is that of RFC 9162: SHA-256 over a zero byte and the leaf.

All inputs are golden (``tests/golden/digests.json``).
"""

import hashlib
from functools import lru_cache
from hashlib import sha256

COMMIT_TAG = b"provenance/commit/v1"
SALT_TAG = b"provenance/salt/v1"
EQUAL_TAG = b"provenance/equal/v1"
BODY_TAG = b"provenance/body/v1"
KEY_TAG = b"provenance/key-id/v1"
# HMAC by hand, as RFC 2104 says: the writer computes a dozen a call, and ``hmac`` takes two to three times as long.
BLOCK = 64
SHORT = 1 << 16
INNER, OUTER = bytes(n ^ 0x36 for n in range(256)), bytes(n ^ 0x5C for n in range(256))


@lru_cache(maxsize=4)
def _keyed(key: bytes) -> tuple["hashlib._Hash", "hashlib._Hash"]:
    """Return the two states in which an HMAC under a key begins; they are copied and never changed."""
    block = (key if len(key) <= BLOCK else sha256(key).digest()).ljust(BLOCK, b"\0")
    return sha256(block.translate(INNER)), sha256(block.translate(OUTER))


def _mac(key: bytes, *pieces: bytes) -> bytes:
    inner, outer = _keyed(key)
    state, whole = inner.copy(), outer.copy()
    for piece in pieces:
        state.update(piece)
    whole.update(state.digest())
    return whole.digest()


def salt(seed: bytes, role: int, row: int, index: int) -> bytes:
    """Derive the salt of one payload from the seed of its frame: 32 bytes."""
    place = SALT_TAG + role.to_bytes(2, "little") + row.to_bytes(4, "little") + index.to_bytes(4, "little")
    block = seed.ljust(BLOCK, b"\0")  # a seed is used once: no state of it is kept
    return sha256(block.translate(OUTER) + sha256(block.translate(INNER) + place).digest()).digest()


def commitment(salt32: bytes, payload: bytes) -> bytes:
    """Return the 32 bytes that bind a payload.

    >>> commitment(bytes(32), b"x").hex()[:16]
    'c9328cf3358a8ad0'
    """
    if len(payload) <= SHORT:
        return hashlib.sha256(COMMIT_TAG + salt32 + payload).digest()
    state = hashlib.sha256(COMMIT_TAG + salt32)  # a large one is not copied
    state.update(payload)
    return state.digest()


def equality(key: bytes, kind: str, parts: tuple[bytes, ...]) -> bytes:
    """Return 32 bytes that are equal if, and only if, kind and parts are, under one key.

    Each part is preceded by its length, so no two lists of parts run together.
    """
    framed = [piece for part in parts for piece in (len(part).to_bytes(8, "little"), part)]
    return _mac(key, EQUAL_TAG + len(kind).to_bytes(1, "little") + kind.encode(), *framed)


def body_key(key: bytes, body: bytes) -> bytes:
    """Return the name under which a body is stored once, however many runs refer to it."""
    return _mac(key, BODY_TAG, body)


def key_id(key: bytes) -> str:
    """Name a key without telling it: 16 hexadecimal digits."""
    return hashlib.sha256(KEY_TAG + key).hexdigest()[:16]


def leaf_hash(leaf: bytes) -> bytes:
    """Hash a leaf as RFC 9162 does."""
    return hashlib.sha256(b"\0" + leaf).digest()


def file_digest(data: bytes) -> str:
    """Digest of content that compares across sites and tools: plain SHA-256, with its name in front."""
    return "sha256:" + hashlib.sha256(data).hexdigest()
