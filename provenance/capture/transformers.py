"""Reading a `generate` call of transformers: its inputs before it runs, its outputs once the return value is fixed.

Ids are the evidence and text is derived. Ids are copied once before the model runs, ids and logits once after,
and nothing in between. Padding is what the mask hides at the ends of a row and what holds a padding token, so each
sequence is recorded unpadded and compares with itself in any batch. A token that is hidden otherwise stays in the
record: hiding it is a matter of the mask.
"""

import math
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from provenance.capture import masks
from provenance.capture.evidence import Observer, tensor_bytes
from provenance.facts import BUFFER, DIGEST, FINISHES, OCTETS, ROLE, TEXT, Field, Payload, SequenceEnd
from provenance.integrity import buffers
from provenance.integrity.digests import file_digest

MEDIA_BYTES = 64 << 20
HOLES, ODD = "batch.mask_holes", "call, of another shape"
# What can stand beside the ids of a prompt, a row for each of its rows.
BESIDE = ("decoder_input_ids", "decoder_attention_mask", "token_type_ids", "position_ids", "negative_prompt_ids",
          "negative_prompt_attention_mask")  # fmt: skip
EOS, LENGTH, STOP, TIME, CRITERIA, RETURNED = (
    FINISHES.index(name) for name in ("eos", "length", "stop_string", "max_time", "criteria", "returned")
)


class Inputs(NamedTuple):
    """What a call was given, per sequence and as facts of the batch."""

    rows: int
    lengths: list[int]  # unpadded tokens per row
    padding: list[int]  # padding tokens per row
    width: int
    payloads: list[Payload]
    facts: dict[str, Any]
    ids: list[bytes]  # little-endian int32 or int64 per row, unpadded


# -- before -----------------------------------------------------------------------------------------


def read_inputs(model: Any, request: Mapping[str, Any], tokenizer: Any) -> Inputs:
    """Read token ids, mask, embeddings and media of a call. ``request`` maps argument names to values."""
    torch = sys.modules["torch"]
    main = _first(request, "inputs", "input_ids")
    payloads: list[Payload] = []
    facts: dict[str, Any] = {}
    ids: list[bytes] = []
    lengths, padding, width, rows = [0], [0], 0, 1
    if _is_ids(torch, main):
        main = main.detach()
        if main.dim() == 1:
            main = main.unsqueeze(0)
        mask, origin = _mask(model, request, main)
        rows, width = int(main.shape[0]), int(main.shape[1])
        kept = masks.without_padding(main, mask, pads(model, request, tokenizer))
        lengths, side = masks.padding(kept, rows, width)
        padding = [width - length for length in lengths]
        ids = _rows(torch, main, kept, lengths)
        payloads += _id_payloads(ids, lengths, tokenizer)
        holes = masks.holes(mask, kept)
        if holes:
            plain = mask.to(torch.uint8).cpu()
            payloads += [
                Payload(ROLE["prompt.mask"], BUFFER, buffers.vector(buffers.UINT8, tensor_bytes(plain[row])), row)
                for row in range(rows)
            ]
        facts["batch.mask_given"] = request.get("attention_mask") is not None
        facts["batch.mask_origin"] = origin
        facts[HOLES] = Field.unknown(HOLES, ODD) if origin == ODD else holes or Field.moot(HOLES, "nothing is hidden")
        facts["batch.padding_side"] = side if any(padding) else Field.moot("batch.padding_side", "no padding")
    media, found_rows = _media(torch, request, main, bool(ids))
    payloads += media
    rows = rows if ids else found_rows
    if not ids:
        lengths = padding = [0] * rows
    facts |= _batch_facts(rows, width, lengths, request)
    return Inputs(rows, lengths, padding, width, payloads, facts, ids)


def _batch_facts(rows: int, width: int, lengths: list[int], request: Mapping[str, Any]) -> dict[str, Any]:
    cache = _first(request, "cache", "past_key_values", "cache_params")
    return {
        "batch.size": rows,
        "batch.max_length": width,
        "batch.sequence_lengths": lengths,
        "input.past_key_values_given": cache is not None,
        "input.empty": width == 0,
    }


def _first(request: Mapping[str, Any], *names: str) -> Any:
    return next((request[name] for name in names if request.get(name) is not None), None)


def _is_ids(torch: Any, value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.dim() in (1, 2)
        and not value.is_floating_point()
        and not value.is_complex()
        and value.dtype is not torch.bool
    )


def _mask(model: Any, request: Mapping[str, Any], ids: Any) -> tuple[Any, str]:
    """Return the mask in force as booleans, or None where nothing is padded, and where it came from."""
    given = request.get("attention_mask")
    if given is not None and getattr(given, "shape", None) == ids.shape:
        mask = given.detach() != 0
        return (None if bool(mask.all()) else mask), "call"
    if given is not None:
        return None, ODD
    own = getattr(model, "generation_config", None)
    config = request.get("generation_config")
    pad, eos = (_setting(name, request, config, own) for name in ("pad_token_id", "eos_token_id"))
    ends = eos if isinstance(eos, (list, tuple)) else [eos]
    if not isinstance(pad, int) or pad in ends or bool(getattr(model.config, "is_encoder_decoder", False)):
        return None, "all ones"
    mask = ids != pad
    return (None, "all ones") if bool(mask.all()) else (mask, "inferred from the padding token")


def _setting(name: str, request: Mapping[str, Any], *configs: Any) -> Any:
    if name in request:
        return request[name]
    return next((getattr(c, name) for c in configs if c is not None and getattr(c, name, None) is not None), None)


def pads(model: Any, request: Mapping[str, Any], tokenizer: Any) -> set[int]:
    """Return the ids that a row may be padded with; none where nobody says."""
    configs = (request.get("generation_config"), getattr(model, "generation_config", None))
    named = [_setting(name, request, *configs) for name in ("pad_token_id", "eos_token_id")]
    named += [getattr(getattr(model, "config", None), "pad_token_id", None), getattr(tokenizer, "pad_token_id", None)]
    flat = [item for value in named for item in (value if isinstance(value, (list, tuple)) else [value])]
    return {item for item in flat if isinstance(item, int)}


def _rows(torch: Any, ids: Any, mask: Any, lengths: list[int]) -> list[bytes]:
    """Return the unpadded ids of each row as little-endian bytes, through one copy of the whole."""
    flat = (ids if mask is None else ids[mask]).cpu()
    wide = flat.numel() > 0 and bool((flat.max() >= buffers.LIMIT).item())
    data = tensor_bytes(flat.to(torch.int64 if wide else torch.int32))
    size = 8 if wide else 4
    pieces, place = [], 0
    for length in lengths:
        pieces.append(data[place : place + length * size])
        place += length * size
    return pieces


def _id_payloads(rows: list[bytes], lengths: list[int], tokenizer: Any) -> list[Payload]:
    payloads = []
    for row, (data, length) in enumerate(zip(rows, lengths, strict=True)):
        dtype = buffers.INT64 if length and len(data) == 8 * length else buffers.INT32
        payloads.append(Payload(ROLE["prompt.ids"], BUFFER, buffers.vector(dtype, data), row))
        text = decode(tokenizer, data, dtype, skip=False)
        if text is not None:
            payloads.append(Payload(ROLE["prompt.text"], TEXT, text, row))
    return payloads


def decode(tokenizer: Any, data: bytes, dtype: int, *, skip: bool) -> bytes | None:
    """Return the text of some ids, or None without a tokenizer. A tokenizer that fails gives no text."""
    if tokenizer is None:
        return None
    numbers = buffers.Buffer(dtype, (len(data) // buffers.WIDTHS[dtype],), data).numbers().tolist()
    try:
        text = tokenizer.decode(numbers, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        return str(text).encode("utf-8", "surrogatepass")
    except Exception:
        return None


def _media(torch: Any, request: Mapping[str, Any], main: Any, ids: bool) -> tuple[list[Payload], int]:
    """Digest embeddings, other float inputs and those beside the ids: they are not decoded, but they do compare."""
    found: list[Payload] = []
    rows = 1
    candidates = {**request, "inputs": main} if main is not None and not ids else dict(request)
    for part, (name, value) in enumerate(sorted(candidates.items())):
        if not isinstance(value, torch.Tensor) or value.dim() < 2:
            continue
        masks = name == "attention_mask" and not ids and not bool((value != 0).all())
        if not (value.is_floating_point() or masks or name in BESIDE):
            continue
        rows = max(rows, int(value.shape[0]))
        role = ROLE["prompt.embeds"] if name == "inputs_embeds" else ROLE["prompt.media"]
        found += [Payload(role, DIGEST, _tensor_digest(name, value[row]), row, 0, part) for row in range(len(value))]
    return found, rows


def _tensor_digest(name: str, value: Any) -> bytes:
    """Return name, type, shape and SHA-256 of a tensor, as one line."""
    head = f"{name} {value.dtype} {tuple(value.shape)} "
    if value.numel() * value.element_size() > MEDIA_BYTES or value.device.type == "meta":
        return (head + "not digested: too large").encode()
    return (head + file_digest(tensor_bytes(value.detach().cpu()))).encode()


# -- after ------------------------------------------------------------------------------------------


class Outputs(NamedTuple):
    """What a call returned, as the end record wants it."""

    sequences: tuple[SequenceEnd, ...]
    payloads: tuple[Payload, ...]
    facts: dict[str, Any]


def read_outputs(model: Any, result: Any, inputs: Inputs, observer: Observer, tokenizer: Any) -> Outputs:
    """Read the sequences that `generate` returned. The result itself is not touched."""
    torch = sys.modules["torch"]
    sequences = getattr(result, "sequences", result)
    if not _is_ids(torch, sequences) or sequences.dim() != 2:
        return _opaque(torch, result, inputs)
    whole = sequences.detach().cpu()
    count = int(whole.shape[0])
    per_prompt = max(1, count // max(1, inputs.rows))
    start = _prompt_length(torch, whole, inputs, observer)
    new = whole[:, start:]
    config = observer.config or getattr(model, "generation_config", None)
    lengths, finishes = _ends(torch, new, config, start, _pads(observer, config, count))
    evidence, why = _evidence(torch, model, observer, lengths)
    ends, payloads = [], []
    for index in range(count):
        row, ret = divmod(index, per_prompt)
        data = tensor_bytes(new[index, : lengths[index]].to(torch.int32))
        payloads.append(Payload(ROLE["output.ids"], BUFFER, buffers.vector(buffers.INT32, data), row, ret))
        text = decode(tokenizer, data, buffers.INT32, skip=True)
        if text is not None:
            payloads.append(Payload(ROLE["output.text"], TEXT, text, row, ret))
        margin, at = math.nan, 0
        if evidence:
            payloads.append(Payload(ROLE["evidence.logits"], OCTETS, evidence[index].data, row, ret))
            margin, at = evidence[index].margin, evidence[index].margin_at
        known = row if row < inputs.rows else 0
        ends.append(
            SequenceEnd(
                row, ret, inputs.lengths[known], lengths[index], inputs.padding[known], finishes[index], margin, at
            )
        )
    facts: dict[str, Any] = {"evidence": why} if why else {}
    facts["logits.dtype"] = _dtype(model)
    if tokenizer is None:
        facts["text"] = "no tokenizer"
    return Outputs(tuple(ends), tuple(payloads), facts)


def _opaque(torch: Any, result: Any, inputs: Inputs) -> Outputs:
    """Record a result that is no sequence of ids (audio, images): its digest, and that it was not decoded."""
    tensors = (
        result.values() if isinstance(result, Mapping) else result if isinstance(result, (tuple, list)) else [result]
    )
    payloads = []
    for part, value in enumerate(tensors):
        if isinstance(value, torch.Tensor):
            payloads.append(Payload(ROLE["output.media"], DIGEST, _tensor_digest("output", value), 0, 0, part))
    rows = [
        SequenceEnd(r, 0, inputs.lengths[r], 0, inputs.padding[r], RETURNED, math.nan, 0) for r in range(inputs.rows)
    ]
    kind = f"{type(result).__module__}.{type(result).__qualname__}"
    return Outputs(
        tuple(rows), tuple(payloads), {"output": f"not decoded: {kind}", "evidence": "the output is not token ids"}
    )


def _prompt_length(torch: Any, whole: Any, inputs: Inputs, observer: Observer) -> int:
    """Return where the new tokens start: as the loop was told, else by looking whether the prompt stands in front."""
    if observer.prompt_length is not None:
        return observer.prompt_length
    if not inputs.ids or whole.shape[1] < inputs.width:
        return 0
    length = inputs.lengths[0]
    head = whole[0, inputs.width - length : inputs.width].to(torch.int32)
    return inputs.width if tensor_bytes(head) == inputs.ids[0] else 0


def _end_tokens(config: Any) -> list[int]:
    eos = getattr(config, "eos_token_id", None)
    return [int(e) for e in (eos if isinstance(eos, (list, tuple)) else [eos]) if isinstance(e, int)]


def _pads(observer: Observer, config: Any, count: int) -> bool:
    """Say whether padding can follow an output that ended without an end token; else such tokens are output.

    A row is padded while others go on, so there must be others, and something that ends one row alone.
    """
    if count == 1:
        return False
    alone = observer.criteria or bool(getattr(config, "stop_strings", None))
    return observer.config is None or (alone and bool(_end_tokens(config)))


def _ends(torch: Any, new: Any, config: Any, start: int, pads: bool) -> tuple[list[int], list[int]]:
    """Return the length of each output without the padding that follows it, and why it ended."""
    ends = _end_tokens(config)
    pad = getattr(config, "pad_token_id", None) if pads else None
    width = int(new.shape[1])
    limit = getattr(config, "max_length", None)
    full = limit is not None and start + width >= int(limit)
    hits = torch.isin(new, torch.tensor(ends, dtype=new.dtype)) if ends else torch.zeros_like(new, dtype=torch.bool)
    lengths, finishes = [], []
    for row in range(int(new.shape[0])):
        places = hits[row].nonzero()
        if len(places):
            lengths.append(int(places[0, 0]) + 1)
            finishes.append(EOS)
            continue
        length = width
        if isinstance(pad, int):
            while length and int(new[row, length - 1]) == pad:
                length -= 1
        lengths.append(length)
        finishes.append(LENGTH if full and length == width else _other_end(config))
    return lengths, finishes


def _other_end(config: Any) -> int:
    if getattr(config, "stop_strings", None):
        return STOP
    return TIME if getattr(config, "max_time", None) else CRITERIA


def _evidence(torch: Any, model: Any, observer: Observer, lengths: list[int]) -> tuple[list[Any], str]:
    """Return the evidence per sequence, or the reason why there is none."""
    if not observer.reason and observer.config is None:
        observer.reason = "a generate of its own: the decoding loop was not seen"
    if observer.reason:
        return [], observer.reason
    try:
        found = observer.collect(torch, lengths, _dtype(model))
    except Exception as error:
        return [], f"{type(error).__name__}: {error}"
    if observer.mode == "sample":  # a margin says nothing of a drawn token
        found = [item._replace(margin=math.nan) for item in found]
    return found, ""


def _dtype(model: Any) -> str:
    return str(getattr(model, "dtype", "")).removeprefix("torch.")
