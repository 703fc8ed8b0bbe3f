"""Two values of a field that differ, of the kind that its name and its present value tell; and what differs with it."""

import random
import re
from typing import Any

from provenance.facts import Field, State
from tests.incidents import hosts

CHOICES: dict[str, tuple[Any, ...]] = {
    "model.dtype": ("bfloat16", "float16", "float32"), "logits.dtype": ("bfloat16", "float16", "float32"),
    "model.attn_implementation": ("sdpa", "eager", "flash_attention_2"), "cpu.arch": ("x86_64", "aarch64"),
    "cpu.model": ("Intel(R) Xeon(R) Platinum 8480+", "AMD EPYC 9654 96-Core Processor", "Neoverse-N1"),
    "cpu.capability": ("AVX2", "AVX512", "DEFAULT"), "generation.mode": ("greedy_search", "sample", "assisted_generation"),
    "engine.name": ("vllm", "sglang", "transformers"), "os.platform": ("linux", "win32", "darwin"),
    "tokenizer.class": ("LlamaTokenizerFast", "LlamaTokenizer"), "batch.padding_side": ("left", "right"),
    "tokenizer.padding_side": ("left", "right"), "env.LANG": ("C.UTF-8", "en_US.UTF-8", "de_DE.UTF-8"),
    "lib.transformers.version": ("4.57.3", "5.24.0", "5.1.0"), "torch.version": ("2.10.0+cu126", "2.11.0+cu126", "2.13.0+cu128"),
    "vllm.attention_config.backend": ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"),
    "vllm.model_config.quantization": ("awq", "awq_marlin", "fp8"), "sglang.quantization": ("fp8", "w8a8_int8", "awq"),
    "vllm.speculative_config.method": ("suffix", "ngram", "eagle"), "context.host": ("node-a", "node-b", "node-c"),
    "model.quantization_config.quant_method": ("bitsandbytes", "gptq", "awq"),
    "weights.missing_unexpected_keys": ({}, {"missing": ["lm_head.weight"], "unexpected": ["lm_head.0.weight"]}),
    "weights.missing_keys": ([], ["lm_head.weight"]), "weights.unexpected_keys": ([], ["lm_head.0.weight"]),
    "device.in_use": (["cuda"], ["cpu"]), "model.device_map": ({"layers": "0,1"}, {"layers": "2,3"}),
    "model.rope_parameters": ({"rope_type": "default"}, {"rope_type": "dynamic", "factor": 2.0}),
    "env.WORLD_SIZE": ("1", "2", "4"), "service.provider": ("alpha", "beta"),
    "generation.cache_implementation": ("dynamic", "static"), "cublas.version": ("12.6.4.1", "12.8.3.14"),
}  # fmt: skip
NUMBERS = re.compile(
    r"(?:^|[._])(?:size|count|n|num|max|min|tokens|length|position|slots|splits|level|index|requests|threads|pid|id)(?:$|[._])"
)
SWITCH = re.compile(
    r"(?:enable|disable|use_|is_|allow|training|active|merged|fixed|built|_fast|benchmark|deterministic|invariant)"
)
HASHED = re.compile(r"(?:sha256|digest|root|revision|code_version|git_version)$")
FLOATS = re.compile(r"(?:temperature|top_p|penalty|_p|scale|threshold|alpha)$")
# What cannot stay the same where a field differs: a consequence, or the same fact said again.
FOLLOWS: dict[str, tuple[str, ...]] = {
    "gpu.0.name": tuple(f"gpu.0.{part}" for part in hosts.GPU_PARTS[1:]),
    "torch.version": ("torch.git_version", "torch.build_config_digest"), "model.dtype": ("logits.dtype",),
    "generation.do_sample": ("generation.mode",), "tokenizer.is_fast": ("tokenizer.class", "tokenizer.sha256"),
    "tokenizer.class": ("tokenizer.sha256",), "tokenizer.special_ids": ("tokenizer.sha256",),
    "tokenizer.added_tokens_digest": ("tokenizer.sha256",), "cpu.model": ("cpu.flags_digest", "cpu.microcode"),
    "batch.size": ("batch.sequence_lengths", "batch.max_length"), "lib.transformers.version": ("model.source_digest",),
    "model.quantization_config.quant_method": ("model.config_digest",), "model.tied_weights": ("model.config_digest",),
    "model.rope_parameters": ("model.config_digest",), "model.revision": ("weights.loaded_root", "weights.files_root"),
    "weights.missing_unexpected_keys": ("weights.loaded_root",), "weights.missing_keys": ("weights.loaded_root",), "weights.files_root": ("weights.loaded_root",),
    "adapters.merged": ("weights.loaded_root",), "cudnn.version": ("loaded.cudnn",),
    "cublas.version": ("loaded.cublas",),
}  # fmt: skip


def named(name: str) -> str:
    """Return the name that a declared pattern has in a run: the first device, a library that is loaded."""
    return ".".join(
        {"N": "0", "NAME": "ggml" if name.startswith("loaded.") else "x"}.get(part, part) for part in name.split(".")
    )


def differ(name: str, a: dict[str, Field], b: dict[str, Field], rng: random.Random) -> list[str]:
    """Give a field two values, and what follows from it too; return the names of all that differ now."""
    if name == "gpu.0.name":
        one, other = rng.sample(range(len(hosts.GPUS)), 2)
        for fields, which in ((a, one), (b, other)):
            for part, value in zip(hosts.GPU_PARTS, hosts.GPUS[which], strict=True):
                fields[f"gpu.0.{part}"] = Field(f"gpu.0.{part}", value)
        return [f"gpu.0.{part}" for part in hosts.GPU_PARTS]
    for item in (name, *FOLLOWS.get(name, ())):
        if item == name or a.get(item) == b.get(item):
            here = a.get(item)
            one, other = two(item, here.value if here is not None and here.state is State.VALUE else None, rng)
            a[item], b[item] = Field(item, one), Field(item, other)
    return [name, *FOLLOWS.get(name, ())]


def two(name: str, present: Any, rng: random.Random) -> tuple[Any, Any]:
    """Return two values of a field; the first is the present one where there is one."""
    if name in CHOICES:
        options = [item for item in CHOICES[name] if item != present]
        first = present if present is not None else options.pop(rng.randrange(len(options)))
        return first, rng.choice(options)
    first = present if present is not None else fresh(name, rng)
    for _ in range(20):
        other = another(first, name, rng)
        if other != first:
            return first, other
    raise AssertionError(f"no second value of {name}")


def fresh(name: str, rng: random.Random) -> Any:
    """Make a value of a field that nobody set, by what its name says."""
    if HASHED.search(name):
        return _sha(rng)
    if name.endswith("version"):
        return _version(rng)
    if FLOATS.search(name):
        return round(rng.uniform(0.1, 1.5), 2)
    if name.startswith("env."):
        return "1"
    if SWITCH.search(name):
        return False
    if NUMBERS.search(name):
        return 2 ** rng.randrange(1, 6)
    if "dtype" in name or name.endswith(("type_k", "type_v")):
        return "float16"
    return f"setting-{rng.randrange(100)}"


def another(value: Any, name: str, rng: random.Random) -> Any:
    """Return a value of the same kind that differs."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value * 2 if value and rng.random() < 0.5 else value + rng.randrange(1, 8)
    if isinstance(value, float):
        return round(value + rng.choice((-1, 1)) * rng.uniform(0.1, 0.7), 2)
    if isinstance(value, list):
        return [*value[:-1], "other"] if value and isinstance(value[0], str) else [*value, 1]
    if isinstance(value, dict):
        return {**value, "changed": rng.randrange(100)}
    if isinstance(value, str) and value.startswith(("sha256:", "p1:sha256:")):
        return value[: value.index("sha256:")] + _sha(rng)
    if isinstance(value, str) and HASHED.search(name) and not value.startswith("build-id:"):
        return f"{rng.getrandbits(160):040x}"
    if isinstance(value, str) and value.isdigit():
        return str(int(value) + 1) if value != "1" else "0"
    if name.endswith("version"):
        return _version(rng)
    if "dtype" in name or name.endswith(("type_k", "type_v")):
        return rng.choice(("bfloat16", "float16", "float32", "fp8"))
    return f"{value}-{rng.randrange(100)}" if isinstance(value, str) else f"other-{rng.randrange(100)}"


def _sha(rng: random.Random) -> str:
    return "sha256:" + f"{rng.getrandbits(256):064x}"


def _version(rng: random.Random) -> str:
    return ".".join(str(rng.randrange(top)) for top in (6, 30, 10))
