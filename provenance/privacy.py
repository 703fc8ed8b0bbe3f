"""What is kept of a call's content, decided before a byte leaves the process.

Three modes, one switch (``capture``): ``full`` keeps prompts and outputs; ``digest`` keeps a salted commitment
and a keyed equality digest in their place, so that runs can still be compared and proved; ``off`` keeps
neither. Counts, times, fingerprints and settings are evidence and not content: they are kept in every mode.
"""

from provenance.facts import ROLE, SEALED, Payload
from provenance.integrity import digests

FULL, DIGEST, OFF = "full", "digest", "off"
# An error's text may quote the prompt, and random states replay it: all of these are content.
SEALED_SIZE = 72
ALWAYS_DROPPED = {
    ROLE["rng.torch_cpu"],
    ROLE["rng.torch_cuda"],
    ROLE["rng.torch_mps"],
    ROLE["rng.torch_xpu"],
    ROLE["rng.python"],
    ROLE["rng.numpy"],
}


def cut(payloads: tuple[Payload, ...], mode: str, seed: bytes, key: bytes) -> tuple[Payload, ...]:
    """Return what may be written of some payloads.

    ``seed`` is the frame's; ``key`` the store's, read only in mode ``digest``.
    """
    if mode == FULL:
        return payloads
    if mode == OFF:
        return ()
    return tuple(seal(item, seed, key) for item in payloads if item.role not in ALWAYS_DROPPED)


def seal(payload: Payload, seed: bytes, key: bytes) -> Payload:
    """Replace content by its commitment (32 bytes), its equality key (32) and its size (8)."""
    salt = digests.salt(seed, payload.role, payload.row, index(payload))
    data = digests.commitment(salt, payload.data) + equality(payload, key) + len(payload.data).to_bytes(8, "little")
    return payload._replace(encoding=payload.encoding | SEALED, data=data)


def equality(payload: Payload, key: bytes) -> bytes:
    """Return the equality key of one payload. Role and row do not count: an output may equal a prompt."""
    return digests.equality(key, str(payload.encoding & ~SEALED), (payload.data,))


def index(payload: Payload) -> int:
    """Return the place of a payload among those of its role and row: return index and part in one number."""
    return payload.ret * 65536 + payload.part
