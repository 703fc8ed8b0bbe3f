"""When a field can matter at all: the words of the catalogue's ``active_when``, evaluated on a run.

A condition is true, false, or None where the run does not tell. ``&`` is both, ``|`` is either and binds less.
A field whose condition is false in both runs is moot; one that cannot be decided stays a suspect.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache

from provenance.facts import Field, Run, State

Truth = bool | None
ENGINES = ("vllm", "sglang", "llama_cpp", "tensorrt_llm", "tgi")
REMOTE = ("openai", "anthropic", "http")
LIBRARIES = {"liger": "liger-kernel"}


# Where an engine or a service keeps its temperature, and its quantisation.
TEMPERATURES = ("vllm.sampling.temperature", "sglang.sampling.temperature", "llama_cpp.sampling.temperature",
                "service.request.temperature")  # fmt: skip
QUANTIZED = ("model.quantization_config.quant_method", "vllm.model_config.quantization", "sglang.quantization")


def active(condition: str, run: Run) -> Truth:
    """Evaluate a condition.

    >>> run = Run("r", "call", "transformers", "generate", "ok", 0, 0, {}, ())
    >>> active("always", run), active("never", run), active("engine.vllm|never", run), active("sample&always", run)
    (True, False, False, None)
    """
    result: Truth = False
    for side in condition.split("|"):
        part: Truth = True
        for word in side.split("&"):
            part = _both(part, truth(word, run))
        result = _either(result, part)
    return result


def moot(condition: str, a: Run, b: Run) -> bool:
    """Say whether a field with this condition can matter in neither run."""
    return active(condition, a) is False and active(condition, b) is False


def _both(one: Truth, other: Truth) -> Truth:
    if one is False or other is False:
        return False
    return None if one is None or other is None else True


def _either(one: Truth, other: Truth) -> Truth:
    if one is True or other is True:
        return True
    return None if one is None or other is None else False


def drew(run: Run) -> bool:
    """Say whether a run is known to have drawn its tokens."""
    return truth("sample", run) is True


def truth(word: str, run: Run) -> Truth:
    """Evaluate one word."""
    if word in ("always", "never"):
        return word == "always"
    head, _, rest = word.partition(".")
    if head == "device":
        return _device(rest, run.fields)
    if head == "engine":
        return run.runtime in ENGINES if rest == "any" else run.runtime == rest
    if head == "lib":
        return _has(run.fields, f"lib.{LIBRARIES.get(rest, rest)}.version")
    test = WORDS.get(word)
    if test is not None:
        return test(run)
    return None


def value(fields: Mapping[str, Field], name: str) -> object:
    """Return a field's value, or None where it has none."""
    found = fields.get(name)
    return found.value if found is not None and found.state is State.VALUE else None


def _has(fields: Mapping[str, Field], name: str) -> Truth:
    """Say whether a field has a value; None where it is not recorded or unknown."""
    found = fields.get(name)
    if found is None or not found.known:
        return None
    return found.state is State.VALUE


def _device(kind: str, fields: Mapping[str, Field]) -> Truth:
    used = value(fields, "device.in_use")
    if not isinstance(used, list):
        return None
    if kind == "rocm":
        return "cuda" in used and bool(value(fields, "rocm.version"))
    return kind in used


def _dtype(name: str, run: Run) -> Truth:
    kind = value(run.fields, "model.dtype")
    cast = [value(run.fields, f"torch.autocast.{device}") for device in ("cpu", "cuda")]
    if any(isinstance(item, str) and item.endswith(name) for item in cast):
        return True
    if kind is None:
        return None
    return name in kind if isinstance(kind, dict) else kind == name


def _kinds(name: str, run: Run) -> Truth:
    kinds = value(run.fields, "model.module_kinds")
    return name in kinds if isinstance(kinds, list) else None


def _more_than_one(name: str, run: Run) -> Truth:
    number = value(run.fields, name)
    return number > 1 if isinstance(number, (int, float)) else _unset(name, run)


def _unset(name: str, run: Run) -> Truth:
    """Treat a field that nobody set as off, and one that was not recorded as unknown."""
    found = run.fields.get(name)
    return False if found is not None and found.known else None


def _sample(run: Run) -> Truth:
    """Say whether tokens were drawn: transformers has a switch for it, engines and services a temperature above 0."""
    chosen = value(run.fields, "generation.do_sample")
    if isinstance(chosen, bool):
        return chosen
    for name in TEMPERATURES:
        found = run.fields.get(name)
        if found is not None and found.state is State.VALUE and isinstance(found.value, (int, float)):
            return found.value > 0
        if found is not None and found.state is State.UNSET:
            return True  # the defaults of all of them draw
    return _unset("generation.do_sample", run)


def _quantized(run: Run) -> Truth:
    known = [_has(run.fields, name) for name in QUANTIZED]
    return True if True in known else None if None in known and False not in known else False


def _mode(text: str, run: Run) -> Truth:
    mode = value(run.fields, "generation.mode")
    return text in mode if isinstance(mode, str) else None


def _set(name: str, run: Run) -> Truth:
    return _has(run.fields, name)


def _assisted(run: Run) -> Truth:
    if value(run.fields, "generation.assistant_model") is not None:
        return True
    lookup = value(run.fields, "generation.prompt_lookup_num_tokens")
    return True if lookup else _mode("assisted", run)


def _static(run: Run) -> Truth:
    kind = value(run.fields, "generation.cache_implementation")
    return "static" in str(kind) if kind is not None else _unset("generation.cache_implementation", run)


def _attention(name: str, run: Run) -> Truth:
    kind = value(run.fields, "model.attn_implementation")
    return name in str(kind) if kind is not None else _unset("model.attn_implementation", run)


def _flag(name: str, run: Run) -> Truth:
    found = value(run.fields, name)
    return found if isinstance(found, bool) else None


def _compiled(run: Run) -> Truth:
    """Say whether anything ran compiled: of the model, or by generate itself, which compiles over a static cache."""
    if value(run.fields, "generation.disable_compile") is not True:
        devices = _either(_device("cuda", run.fields), _device("xpu", run.fields))
        if _both(_static(run), devices) is True:
            return True
    return _flag("torch.compile.active", run)


def _padding(run: Run) -> Truth:
    known = [sequence.padding for sequence in run.sequences if sequence.padding is not None]
    return any(known) if known else None


def _autocast(run: Run) -> Truth:
    states = [value(run.fields, f"torch.autocast.{device}") for device in ("cpu", "cuda")]
    return any(state not in (None, "off") for state in states) if any(states) else None


def _world(run: Run) -> Truth:
    made = value(run.fields, "distributed.initialized")
    if made is not None:
        return bool(made)
    size = value(run.fields, "env.WORLD_SIZE")
    if size is None:
        return _unset("env.WORLD_SIZE", run)
    return str(size) not in ("", "0", "1")


WORDS: dict[str, Callable[[Run], Truth]] = {
    "fp32": lambda run: _dtype("float32", run),
    "fp16": lambda run: _dtype("float16", run),
    "bf16": lambda run: _dtype("bfloat16", run),
    "conv": lambda run: _kinds("conv", run),
    "rnn": lambda run: _kinds("rnn", run),
    "moe": lambda run: _kinds("moe", run),
    "encdec": lambda run: _flag("model.is_encoder_decoder", run),
    "sdpa": lambda run: _attention("sdpa", run),
    "flash": lambda run: _attention("flash", run),
    "sample": _sample,
    "beam": lambda run: _more_than_one("generation.num_beams", run),
    "group_beam": lambda run: _more_than_one("generation.num_beam_groups", run),
    "assisted": _assisted,
    "contrastive": lambda run: _mode("contrastive", run),
    "guidance": lambda run: _set("generation.guidance_scale", run),
    "watermark": lambda run: _set("generation.watermarking_config", run),
    "static_cache": _static,
    "compile": _compiled,
    "deterministic": lambda run: _flag("torch.deterministic_algorithms", run),
    "autocast": _autocast,
    "training": lambda run: _flag("model.training", run),
    "quantized": _quantized,
    "adapter": lambda run: _set("adapter.names", run),
    "distributed": _world,
    "remote": lambda run: run.runtime in REMOTE,
    "batch.size>1": lambda run: _more_than_one("batch.size", run),
    "batch.has_padding": _padding,
    "input.empty": lambda run: _flag("input.empty", run),
    "torchscript": lambda _: False,
}


@lru_cache(maxsize=1)
def phrases() -> dict[str, str]:
    """Say in words why a condition does not hold, for the dismissals that people read."""
    return {
        "sample": "greedy decoding draws nothing",
        "device.cuda": "no CUDA device was in use",
        "device.cpu": "no work ran on the CPU",
        "device.rocm": "no ROCm device was in use",
        "device.mps": "no MPS device was in use",
        "device.xpu": "no XPU device was in use",
        "device.tpu": "no TPU was in use",
        "beam": "there was no beam search",
        "assisted": "there was no assisted decoding",
        "batch.has_padding": "nothing was padded",
        "batch.size>1": "each batch held one prompt",
        "fp32": "no float32 parameters took part",
        "fp16": "no float16 parameters took part",
        "bf16": "no bfloat16 parameters took part",
        "conv": "the model has no convolutions",
        "rnn": "the model has no recurrent layers",
        "compile": "the model was not compiled",
        "distributed": "the run was not distributed",
        "static_cache": "no static cache was used",
        "sdpa": "attention did not run through SDPA",
        "flash": "flash attention was not in use",
        "encdec": "the model has no encoder",
        "quantized": "the model was not quantized",
        "adapter": "no adapter was attached",
        "training": "the model was in evaluation mode",
        "deterministic": "deterministic algorithms were off",
    }


def why_moot(condition: str, a: Run, b: Run) -> str:
    """Return the sentence for a condition that holds in neither run."""
    if condition == "never":
        return "it is context and never acts on an output"
    for word in condition.replace("|", "&").split("&"):
        if truth(word, a) is False and truth(word, b) is False:
            if word.startswith("lib."):
                return f"{word[4:]} is not installed"
            if word.startswith("engine."):
                return f"the run did not go through {word[7:]}"
            if word == "remote":
                return "no remote service took part"
            return phrases().get(word, f"neither run was {word}")
    return f"its condition ({condition}) holds in neither run"
