"""What is kept of a call's content, decided before a byte leaves the process.

Three modes, one switch (``capture``): ``full`` keeps prompts and outputs; ``digest`` keeps a salted commitment
and a keyed equality digest in their place, so that runs can still be compared and proved; ``off`` keeps
neither. Counts, times, fingerprints and settings are evidence and not content: they are kept in every mode. Where a
setting holds words of the user's (a stop string, a banned word, a grammar), it is content all the same.
"""

from collections.abc import Iterable

import orjson

from provenance.catalogue.fields import table
from provenance.facts import KIND, ROLE, SEALED, TRUNCATED, Field, Payload, State
from provenance.integrity import digests
from provenance.integrity.canonical import plain
from provenance.integrity.secrets import holds, withheld

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
# Settings that hold words of the user's, or their ids. One id with a part in the loop (an end token) is a setting.
CONTENT = frozenset({
    "stop_strings", "stop", "bad", "bad_words", "bad_words_ids", "force_words_ids", "constraints", "sequence_bias",
    "suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids", "forced_ids", "logit_bias",
    "allowed_token_ids", "allowed_words", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "grammar", "json_schema", "regex", "ebnf", "structural_tag", "structured_outputs", "response_format",
    "system_prompt", "system", "prompt", "prompt_ids", "negative_prompt", "negative_prompt_ids", "initial_prompt",
    "chat_template", "template", "prefix", "suffix", "logits_processor_values", "stopping_criteria_values",
    "logits_processor_code", "stopping_criteria_code", "prefix_allowed_tokens_fn_code", "constraints_code",
    "custom_generate_code"
})  # fmt: skip
# There stands the name of a type or of an adapter, and no value.
NAMED_ONLY = {"logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "assistant_model", "custom_generate",
              "negative_prompt_ids", "synced_gpus", "streamer", "lora_request"}  # fmt: skip
NOT_KEPT = "content is not kept (capture=off)"


def guarded(fields: Iterable[Field], mode: str, key: bytes) -> list[Field]:
    """Return settings as they may be written: without secrets, and, unless everything is kept, without content."""
    return [_guarded(item, mode, key) for item in fields]


def _guarded(item: Field, mode: str, key: bytes) -> Field:
    if item.state is not State.VALUE:
        return item
    value, name = item.value, item.name.rpartition(".")[2]
    if withheld(name, value) or (isinstance(value, (str, list, tuple, dict)) and holds(value)):
        return Field.secret(item.name, item.source)
    if mode == FULL or not _content(item.name, name, value):
        return item
    if mode == OFF:
        return Field(item.name, None, State.REDACTED, NOT_KEPT, item.source)
    data = orjson.dumps(plain(value), option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    return Field(item.name, "hmac:" + digests.equality(key, name, (data,)).hex(), item.state, item.reason, item.source)


def _content(field: str, name: str, value: object) -> bool:
    """Say whether a setting holds content: by its name, or, where no list names it, by what it is."""
    if value in (None, "", [], (), {}) or isinstance(value, (bool, int, float)) or name in NAMED_ONLY:
        return False
    if isinstance(value, str) and value.startswith("hmac:"):
        return False
    return name in CONTENT or field not in table()


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


def truncate(payload: Payload, seed: bytes, key: bytes) -> Payload:
    """Keep the digests of all bytes of a payload that is too large to keep, and the mark that it was."""
    sealed = seal(payload, seed, key)
    return sealed._replace(encoding=sealed.encoding | TRUNCATED)


def equality(payload: Payload, key: bytes) -> bytes:
    """Return the equality key of one payload. Role and row do not count: an output may equal a prompt."""
    return digests.equality(key, str(payload.encoding & KIND), (payload.data,))


def index(payload: Payload) -> int:
    """Return the place of a payload among those of its role and row: return index and part in one number."""
    return payload.ret * 65536 + payload.part
