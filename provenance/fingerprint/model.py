"""A loaded model as fields: what it is, how it computes, the tokenizer beside it. Values in force, not requests.

`Guard` tells in microseconds whether a model is still what it was: it walks modules and tensors, comparing
identity, version and address, and the few settings that can change without a tensor changing.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import orjson

from provenance.facts import Field, Fingerprint
from provenance.fingerprint import identity, structure
from provenance.fingerprint.reading import Moot, Reader, module, read_all, short_path
from provenance.integrity.digests import file_digest

QUANTIZATION = (
    "quant_method", "bits", "group_size", "sym", "desc_act", "zero_point", "format", "backend", "load_in_8bit",
    "load_in_4bit", "llm_int8_threshold", "llm_int8_skip_modules", "llm_int8_enable_fp32_cpu_offload",
    "bnb_4bit_compute_dtype", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage",
    "modules_to_not_convert", "kv_cache_scheme", "activation_scheme",
)  # fmt: skip
# Packages whose layers, or whose tensors, hold quantised weights.
QUANTIZED = re.compile(
    r"(torch\.ao\.nn\.(?:intrinsic\.)?quantized(?:\.dynamic|\.reference)?|torchao|bitsandbytes|auto_gptq|gptqmodel|awq"
    r"|hqq|eetq|quanto|optimum\.quanto|aqlm|compressed_tensors)(?:\.|$)"
)
WIDTH = re.compile(r"(?:int|float|linear|bit|nf|fp)_?(16|8|4|2)", re.IGNORECASE)


def fingerprint(model: Any, tokenizer: Any = None) -> Fingerprint:
    """Read a loaded model and its tokenizer. Weights are not among the fields: their digests come late."""
    config = getattr(model, "config", None)
    found = read_all(_model(model, config), "model")
    found += _quantization(model, config)
    if tokenizer is not None:
        found += read_all(_tokenizer(_part(tokenizer, "tokenizer") or tokenizer), "tokenizer")
        found += read_all(_processor(tokenizer), "processor")
    else:
        found.append(Field.unknown("tokenizer.sha256", "no tokenizer was given to wrap()"))
    found += structure.fields(model) + identity.fields(model, tokenizer)
    return Fingerprint.of("model", found)


def _model(model: Any, config: Any) -> dict[str, Reader]:
    return {
        "model.class": lambda: f"{type(model).__module__}.{type(model).__qualname__}",
        "model.name_or_path": lambda: short_path(str(config._name_or_path), os.path.expanduser("~")) or None,
        "model.config_digest": lambda: config_digest(config),
        "model.config_rest_digest": lambda: identity.rest_digest(config),
        **{name: partial(identity.computed, config, names) for name, names in identity.COMPUTED.items()},
        "model.buffer_dtypes": lambda: _buffer_dtypes(model),
        "model.dtype": lambda: _dtypes(model),
        "model.attn_implementation": lambda: _per_part(config, "_attn_implementation"),
        "model.experts_implementation": lambda: _per_part(config, "_experts_implementation"),
        "model.use_kernels": lambda: bool(getattr(model, "_use_kernels", False)),
        "model.offload": lambda: _offload(model),
        "model.tp_size": lambda: getattr(model, "_tp_size", None) or 1,
        "model.training": lambda: any(module.training for module in modules(model)),
        "model.dropout_probs": lambda: _dropout(config),
        "model.device_map": lambda: _device_map(model),
        "device.in_use": lambda: sorted({tensor.device.type for tensor in tensors(model)}),
        "model.tied_weights": lambda: getattr(config, "tie_word_embeddings", None),
        "model.rope_parameters": lambda: _plain(getattr(config, "rope_parameters", None)),
        "model.sliding_window": lambda: getattr(config, "sliding_window", None),
        "model.max_position_embeddings": lambda: getattr(config, "max_position_embeddings", None),
        "model.is_encoder_decoder": lambda: bool(getattr(config, "is_encoder_decoder", False)),
        "model.module_kinds": lambda: _kinds(model),
        "model.forward_hooks": lambda: _hooks(model),
        "model.attention_backend_resolved_sdpa": lambda: _sdpa(model, config),
        "adapter.names": lambda: _adapters(model),
    }


def _tokenizer(tokenizer: Any) -> dict[str, Reader]:
    return {
        "tokenizer.class": lambda: type(tokenizer).__name__,
        "tokenizer.is_fast": lambda: bool(tokenizer.is_fast),
        "tokenizer.sha256": lambda: tokenizer_digest(tokenizer),
        "tokenizer.vocab_size": lambda: len(tokenizer),
        "tokenizer.special_ids": lambda: {
            name: getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "unk")
        },
        "tokenizer.padding_side": lambda: tokenizer.padding_side,
        "tokenizer.truncation_side": lambda: tokenizer.truncation_side,
        "tokenizer.model_max_length": lambda: int(tokenizer.model_max_length),
        "tokenizer.added_tokens_digest": lambda: _added_tokens(tokenizer),
        "tokenizer.add_bos": lambda: _adds_bos(tokenizer),
        # how the record's own text is made: prompts with special tokens, outputs without
        "tokenizer.decode_flags": lambda: {"skip_special_tokens": "output", "clean_up_tokenization_spaces": False},
        "tokenizer.clean_up_tokenization_spaces": lambda: tokenizer.clean_up_tokenization_spaces,
        "chat_template.sha256": lambda: _template(tokenizer),
        "chat_template.uses_date": lambda: "strftime_now" in str(tokenizer.chat_template or ""),
    }


def _part(processor: Any, name: str) -> Any:
    """Return a part of a processor, which can stand where a tokenizer stands; None where there is none."""
    try:
        return getattr(processor, name, None)
    except Exception:  # a wrapper that refuses: its fields will say so
        return None


def _processor(processor: Any) -> dict[str, Reader]:
    """Read the half of a processor that makes pixels: its implementation decides them as much as its settings."""
    return {
        "processor.backend": lambda: type(_images(processor)).__name__,
        "processor.config_digest": lambda: config_digest(_images(processor)),
    }


def _images(processor: Any) -> Any:
    found = _part(processor, "image_processor")
    if found is None:
        raise Moot("no image processor was given")
    return found


def config_digest(config: Any) -> str:
    """Digest the resolved configuration, without labels. Equal digests dismiss every single value in it."""
    document = {key: value for key, value in config.to_dict().items() if key not in identity.LABELS}
    data = orjson.dumps(document, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS, default=str)
    return file_digest(data)


def tokenizer_digest(tokenizer: Any) -> str:
    """Digest what the tokenizer does: the whole pipeline of a fast one, the vocabulary of a slow one.

    Padding and truncation are left out: they are set by each call and recorded with it. They stand at the head of the
    pipeline's text, so it is cut and not parsed: some are tens of megabytes.
    """
    text = _pipeline(tokenizer)
    if text is None:
        return file_digest(orjson.dumps(sorted(tokenizer.get_vocab().items())))
    return file_digest(text[text.index('"added_tokens"') :].encode("utf-8", "surrogatepass"))


def _added_tokens(tokenizer: Any) -> str:
    return file_digest(repr(sorted(tokenizer.added_tokens_decoder.items())).encode())


def _pipeline(tokenizer: Any) -> str | None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return str(backend.to_str()) if backend is not None else None


def _adds_bos(tokenizer: Any) -> bool:
    """Say whether a text gets the token that begins one, from what the tokenizer appends to every text.

    It is not tried: to call the tokenizer of somebody else's program would set its padding and truncation.
    """
    text = _pipeline(tokenizer)
    if text is None:
        return bool(tokenizer.add_bos_token)
    start = text.rindex('"post_processor":') + len('"post_processor":')
    steps = orjson.loads(text[start : text.index(',"decoder":', start)]) or {}
    first = tokenizer.bos_token
    for step in steps.get("processors", [steps]):
        for item in step.get("single", [])[:1]:
            if "SpecialToken" in item and item["SpecialToken"]["id"] == first:
                return True
        if step.get("cls") and step["cls"][0] == first:
            return True
    return False


def _template(tokenizer: Any) -> str:
    template = tokenizer.chat_template
    if not template:
        raise Moot("the tokenizer has no chat template")
    return file_digest(str(template).encode("utf-8", "surrogatepass"))


def _dtypes(model: Any) -> object:
    counts = Counter(str(tensor.dtype).removeprefix("torch.") for tensor in tensors(model, buffers=False))
    return next(iter(counts)) if len(counts) == 1 else dict(sorted(counts.items()))


def _buffer_dtypes(model: Any) -> object:
    """Count buffers by type: a cast of the whole model takes tables along that others keep in float32."""
    found = Counter(
        str(item.dtype).removeprefix("torch.")
        for part in modules(model)
        for item in part._buffers.values()
        if item is not None
    )
    return dict(sorted(found.items()))


def _dropout(config: Any) -> object:
    table = config.to_dict()
    return {key: value for key, value in sorted(table.items()) if "dropout" in key and isinstance(value, (int, float))}


def _device_map(model: Any) -> object:
    mapped = getattr(model, "hf_device_map", None)
    if mapped:
        return {str(key): str(value) for key, value in mapped.items()}
    return str(getattr(model, "device", "unknown"))


def _kinds(model: Any) -> list[str]:
    """Name the kinds of operators that some switches act on alone."""
    names = {type(module).__name__.lower() for module in modules(model)}
    marks = {"conv": "conv", "lstm": "rnn", "gru": "rnn", "expert": "moe", "moe": "moe",
             "batchnorm": "norm of batches", "instancenorm": "norm of batches"}  # fmt: skip
    return sorted({kind for mark, kind in marks.items() if any(mark in name for name in names)})


def _hooks(model: Any) -> object:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules(model))


def _adapters(model: Any) -> object:
    found = getattr(model, "peft_config", None)
    if not found:
        raise Moot("no adapter is attached")
    return sorted(map(str, found))


def _quantization(model: Any, config: Any) -> list[Field]:
    prefix = "model.quantization_config."
    setting = getattr(config, "quantization_config", None)
    if setting is None:
        made = _converted(model)
        why = "it was quantized without a configuration" if made else "the model is not quantized"
        names = (*QUANTIZATION, "other_digest")
        return [
            Field(prefix + name, made[name], source="layers") if name in made else Field.moot(prefix + name, why)
            for name in names
        ]
    table = dict(setting if isinstance(setting, Mapping) else setting.to_dict())
    found = [_quantized(prefix + name, table.pop(name, None)) for name in QUANTIZATION]
    rest = orjson.dumps(_plain(table), option=orjson.OPT_SORT_KEYS)
    return [*found, Field(prefix + "other_digest", file_digest(rest), source="model")]


def _converted(model: Any) -> dict[str, Any]:
    """Tell from its layers how a model was quantised after it was loaded: no configuration says so.

    Only classes are looked at: to ask a packed layer for its weights would unpack them.
    """
    ways: set[str] = set()
    widths: set[int] = set()
    for part in modules(model):
        slots = part.__dict__
        seen = [(type(part), "", str(slots.get("dtype", "")))]
        kinds = {type(item) for item in slots["_parameters"].values()}
        for kind, name, told in [*seen, *((kind, f" {kind.__name__}", "") for kind in kinds)]:
            home = QUANTIZED.match(kind.__module__)
            if home is not None:
                ways.add(home[1] + name)
                widths.update(int(n) for n in WIDTH.findall(f"{told} {kind.__name__}"))
    if not ways:
        return {}
    found: dict[str, Any] = {"quant_method": ", ".join(sorted(ways))}
    return found | ({"bits": sorted(widths) if len(widths) > 1 else min(widths)} if widths else {})


def _quantized(name: str, value: Any) -> Field:
    return Field.unset(name, "model") if value is None else Field(name, _plain(value), source="model")


def _per_part(config: Any, name: str) -> object:
    """Return a setting of the configuration; where parts of the model differ in it, that of each part."""
    whole = getattr(config, name, None)
    parts = {"": whole} if whole is not None else {}
    for part in getattr(config, "sub_configs", None) or {}:
        inner = getattr(getattr(config, part, None), name, None)
        if inner is not None:
            parts[part] = inner
    values = {str(value) for value in parts.values()}
    return (
        next(iter(parts.values())) if len(values) == 1 else {key or "whole": str(v) for key, v in parts.items()} or None
    )


def _offload(model: Any) -> bool:
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    return bool(places & {"cpu", "disk"}) and len(places) > 1


def _sdpa(model: Any, config: Any) -> object:
    """Name the kernels that SDPA may choose from on the devices of a model, by the switches in force at its reading."""
    if getattr(config, "_attn_implementation", None) != "sdpa":
        raise Moot("attention does not run through SDPA")
    torch = module("torch")
    devices = {tensor.device.type for tensor in tensors(model)}
    names = ["flash", "math"] if "cpu" in devices or "cuda" in devices else ["math"]
    if "cuda" in devices:
        names = ["flash", "mem_efficient", "math", *([] if torch.version.hip else ["cudnn"])]
    return [name for name in names if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()]


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value)


# -- walking ----------------------------------------------------------------------------------------


def modules(model: Any) -> Iterator[Any]:
    """Walk all modules, depth first, without the set and the names that torch's own walk keeps."""
    stack = [model]
    while stack:
        module = stack.pop()
        yield module
        stack.extend(child for child in module._modules.values() if child is not None)


def tensors(model: Any, buffers: bool = True) -> Iterator[Any]:
    """Walk all parameters, and buffers too, those outside the state dict included."""
    for part in modules(model):
        yield from (item for item in part._parameters.values() if item is not None)
        if buffers:
            yield from (item for item in part._buffers.values() if item is not None)


def guard(model: Any) -> tuple[object, ...]:
    """Return what is equal between two calls if nobody touched the model: a few microseconds a module.

    Identity, version and address of every tensor, the modules, training bits, hooks, a forward or a compiled call put
    in another's place, the adapters in force, and the settings that act without a tensor. What stands last can change
    while every tensor stays; `load` leaves it out.
    """
    seen: list[object] = []
    kinds: set[type] = set()
    parts = list(modules(model))
    for part in parts:
        slots = part.__dict__
        kinds.add(type(part))
        seen.append(part.training)
        if part._forward_hooks or part._forward_pre_hooks:
            # by their numbers, which are never given twice: another hook may lie where the last one lay
            seen.append((*part._forward_hooks, 0, *part._forward_pre_hooks))
        if "forward" in slots or "_compiled_call_impl" in slots:
            seen.append((id(part), id(slots.get("forward")), id(slots.get("_compiled_call_impl"))))
        if "merged_adapters" in slots:  # a merge writes past the version of the tensor that it changes
            seen.append((tuple(part.merged_adapters), identity.force(part)))
        for table in (part._parameters, part._buffers):
            for item in table.values():
                if item is not None:
                    seen.append(_mark(item))
    config = getattr(model, "config", None)
    ids = list(map(id, parts))
    return (
        hash(tuple(ids)),
        hash(frozenset((kind, getattr(kind, "forward", None)) for kind in kinds)),
        hash(tuple(seen)),
        len(seen),
        getattr(config, "_attn_implementation", None),
        getattr(config, "_experts_implementation", None),
        structure.marks(model, parts, ids),
    )


def load(guard: tuple[object, ...]) -> tuple[object, ...]:
    """Return the part of a guard that says whether the tensors may be others: they would be hashed again."""
    return guard[:-1]


def _mark(tensor: Any) -> tuple[int, int, int]:
    try:
        return id(tensor), tensor._version, tensor.data_ptr()
    except RuntimeError:  # inference tensors keep no version; some wrappers have no address
        return id(tensor), -1, 0
