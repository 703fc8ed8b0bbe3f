"""What leaves the process: everything, commitments and keys in its place, or nothing; and never what replays a prompt."""

import pytest

from provenance import privacy
from provenance.facts import BUFFER, ROLE, SEALED, TEXT, VALUE, Payload
from provenance.integrity import digests
from provenance.store import leaves

SEED, KEY, OTHER = bytes(range(32)), bytes(range(32, 64)), bytes(32)
SECRET = b"the prompt that nobody may read"
PAYLOADS = (
    Payload(ROLE["prompt.text"], TEXT, SECRET, 2),
    Payload(ROLE["output.ids"], BUFFER, b"\x01\x01" + SECRET, 0, 3, 5),
    Payload(ROLE["error.text"], TEXT, b"cannot parse " + SECRET),
    Payload(ROLE["evidence.logits"], VALUE, SECRET * 3),
    Payload(ROLE["arguments"], VALUE, b""),
)


def test_full_keeps_every_payload_as_it_is() -> None:
    assert privacy.cut(PAYLOADS, "full", SEED, KEY) is PAYLOADS


def test_off_keeps_none() -> None:
    assert privacy.cut(PAYLOADS, "off", SEED, KEY) == ()


def test_digest_keeps_places_and_sizes_and_not_a_byte_of_content() -> None:
    cut = privacy.cut(PAYLOADS, "digest", SEED, KEY)
    assert [(p.role, p.row, p.ret, p.part) for p in cut] == [(p.role, p.row, p.ret, p.part) for p in PAYLOADS]
    assert [leaves.size(p) for p in cut] == [len(p.data) for p in PAYLOADS]
    assert all(p.encoding == before.encoding | SEALED for p, before in zip(cut, PAYLOADS, strict=True))
    for item in cut:
        assert len(item.data) == privacy.SEALED_SIZE
        assert not any(SECRET[n : n + 6] in item.data for n in range(len(SECRET) - 6))


@pytest.mark.parametrize("role", ["rng.torch_cpu", "rng.torch_cuda", "rng.torch_mps", "rng.python", "rng.numpy"])
def test_a_random_state_is_not_even_sealed(role: str) -> None:
    assert privacy.cut((Payload(ROLE[role], BUFFER, b"state"),), "digest", SEED, KEY) == ()


@pytest.mark.parametrize("payload", PAYLOADS, ids=lambda payload: str(payload.role))
def test_a_sealed_payload_proves_what_the_open_one_would(payload: Payload) -> None:
    """Salt and commitment, which stand in the leaf, are the same whether content was kept or not."""
    salt = leaves.salt(payload, SEED)
    assert leaves.committed(privacy.seal(payload, SEED, KEY), salt) == leaves.committed(payload, salt)


def test_equal_contents_have_equal_keys_wherever_they_stand() -> None:
    one = privacy.seal(Payload(ROLE["prompt.ids"], BUFFER, SECRET), SEED, KEY).data[32:64]
    other = privacy.seal(Payload(ROLE["output.ids"], BUFFER, SECRET, 1, 1, 1), OTHER, KEY).data[32:64]
    assert one == other


def test_equality_is_told_only_under_the_stores_key_and_only_within_one_encoding() -> None:
    payload = Payload(ROLE["prompt.ids"], BUFFER, SECRET)
    keys = {privacy.equality(p, key) for p in (payload, payload._replace(encoding=TEXT)) for key in (KEY, OTHER)}
    assert len(keys) == 4


def test_a_commitment_cannot_be_guessed_without_its_salt() -> None:
    one, other = (privacy.seal(PAYLOADS[0], seed, KEY).data[:32] for seed in (SEED, OTHER))
    assert one != other
    assert one != digests.commitment(bytes(32), SECRET)


def test_no_two_payloads_of_a_frame_share_a_commitment() -> None:
    same = [Payload(1, BUFFER, SECRET, row, ret, part) for row in (0, 1) for ret in (0, 1) for part in (0, 1)]
    assert len({item.data[:32] for item in privacy.cut(tuple(same), "digest", SEED, KEY)}) == 8
