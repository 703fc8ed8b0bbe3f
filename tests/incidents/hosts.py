"""The run that every pair starts from: a run really recorded on a CPU, put onto a host of the kind that a case needs.

`base.json` holds the fields of the recorded run. The facts of the GPUs are those of real devices; what an engine adds
are its own settings, unset where nobody would set them.
"""

import json
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from provenance.catalogue.fields import spec, table
from provenance.explain import conditions
from provenance.facts import Field, Run, State
from tests.incidents.homes import HERE, Case

# Name, compute capability, multiprocessors, bytes of memory, bytes of L2 cache.
GPUS = (
    ("NVIDIA A100-SXM4-80GB", "8.0", 108, 85899345920, 41943040),
    ("NVIDIA H100 80GB HBM3", "9.0", 132, 85899345920, 52428800),
    ("NVIDIA A10", "8.6", 72, 24146608128, 6291456),
    ("NVIDIA L4", "8.9", 58, 24152899584, 50331648),
    ("NVIDIA H200", "9.0", 132, 150754820096, 62914560),
)
GPU_PARTS = ("name", "compute_capability", "multi_processor_count", "memory_total", "l2_cache_size")
CUDA: dict[str, Any] = {
    "gpu.count": 1, "gpu.driver_version": "570.124.06", "gpu.cuda_driver_api_version": "12.8", "gpu.nvml_version": "12.570.124.06",
    "gpu.0.uuid_digest": "sha256:" + "5" * 64, "gpu.0.vbios": "92.00.A0.00.0A", "gpu.0.ecc_mode": [1, 1],
    "gpu.0.persistence_mode": 1, "gpu.0.compute_mode": 0, "gpu.0.mig_mode": [0, 0], "gpu.0.warp_size": 32,
    "gpu.0.topology_digest": "sha256:" + "6" * 64, "gpu.0.sm_clock": 1410, "gpu.0.temperature": 41,
    "gpu.0.utilization": 3, "gpu.0.power_watts": 71, "gpu.0.other_processes": 0, "cuda.runtime_version": "12.6",
    "cudnn.version": 91002, "cublas.version": "12.6.4.1", "cublaslt.version": "12.6.4.1", "nccl.version": "2.27.3",
    "device.in_use": ["cuda"], "model.device_map": "cuda:0", "torch.cuda.allocator_backend": "native",
    "torch.backends.cuda.cublas_workspace_size": 8519680, "loaded.cudnn": "build-id:" + "7" * 40,
    "loaded.cublas": "build-id:" + "8" * 40, "rng.torch_cuda_state_sha256": "sha256:" + "9" * 64,
}  # fmt: skip
# Which runtime of ours a report's runtime is: the first word that stands in it.
FAMILIES = (
    ("openai", ("openai", "openrouter", "ollama", "anthropic", "api")),
    ("tensorrt_llm", ("tensorrt-llm",)),
    ("sglang", ("sglang",)),
    ("vllm", ("vllm",)),
    ("llama_cpp", ("llama.cpp",)),
    ("transformers", ("transformers", "torch", "peft", "unsloth", "bitsandbytes", "lens", "mlx", "automodel", "atoma")),
)
ENGINE_FAMILIES = ("vllm", "sglang", "llama_cpp", "tensorrt_llm")
CPU_WORDS = ("(cpu", "cpu)", " arm ", "on cpu")
LIVE_SAMPLING = {"vllm": "vllm.sampling.temperature", "llama_cpp": "llama_cpp.sampling.temperature",
                 "openai": "service.request.temperature", "sglang": "sglang.sampling.temperature"}  # fmt: skip


@lru_cache(maxsize=1)
def recorded() -> dict[str, Field]:
    """Return the fields of the run that was really recorded."""
    form = json.loads((HERE / "base.json").read_text(encoding="utf-8"))
    return {name: Field.read(name, item) for name, item in form["fields"].items()}


def family(case: Case, names: Iterable[str]) -> str:
    """Say which runtime of ours a case ran on, by its own word for it, else by whose settings decide it."""
    text = case.runtime.lower()
    found = next((name for name, words in FAMILIES if any(word in text for word in words)), "function")
    engines = Counter(
        word[7:] for name in names for word in spec(name).active_when.split("|") if word.startswith("engine.")
    )
    wanted = [name for name, _ in engines.most_common() if name != "any"] or ["vllm"] * ("any" in engines)
    served = found in ENGINE_FAMILIES and set(engines) == {"any"}
    return found if not wanted or served or found in (*wanted, "openai") else wanted[0]


def base(case: Case, names: list[str]) -> dict[str, Field]:
    """Return the fields of a run of this case's runtime, on a host on which its deciding fields can matter."""
    runtime = family(case, names)
    fields = dict(recorded())
    fields["app.code_version"] = Field("app.code_version", "3f" * 20)
    fields["model.dtype"] = Field("model.dtype", "bfloat16")
    fields["logits.dtype"] = Field("logits.dtype", "bfloat16")
    fields["batch.size"] = Field("batch.size", 1)
    fields["batch.padding_side"] = Field.moot("batch.padding_side", "no padding")
    if not any(word in f"{case.runtime} {case.symptom}".lower() for word in CPU_WORDS):
        on_cuda(fields)
    if runtime != "transformers":
        fields = {name: item for name, item in fields.items() if not name.startswith(("generation.", "rng.", "seed."))}
        alone(fields)
    if runtime in ENGINE_FAMILIES or runtime == "openai":
        of_engine(fields, runtime)
    for name in names:
        satisfy(spec(name).active_when, fields, runtime)
    return fields


def alone(fields: dict[str, Field]) -> None:
    """Take out what is known of a batch: an engine, a service and a function do not tell."""
    for name in [name for name in fields if name.startswith("batch.")]:
        del fields[name]


def on_cuda(fields: dict[str, Field], which: int = 0) -> None:
    """Put the run on a host with a GPU, whatever device it was recorded on."""
    values = {**CUDA, **dict(zip((f"gpu.0.{part}" for part in GPU_PARTS), GPUS[which], strict=True))}
    for name, value in values.items():
        fields[name] = Field(name, value)


def of_engine(fields: dict[str, Field], runtime: str) -> None:
    """Add the settings of an engine or a service as they stand where nobody set them."""
    prefix = "service." if runtime == "openai" else f"{runtime}."
    for name in table():
        if name.startswith(prefix) and "NAME" not in name and "N" not in name.split("."):
            fields.setdefault(name, Field.unset(name, "engine"))
    live = LIVE_SAMPLING.get(runtime)
    if live:
        fields[live] = Field(live, 0.0)
    why = f"{runtime} holds its weights itself"
    fields["weights.loaded_root"] = Field.unknown("weights.loaded_root", why)
    fields["batch.dynamic"] = Field("batch.dynamic", value=True)
    fields["engine.name"] = Field("engine.name", runtime)


WORDS: dict[str, dict[str, Any]] = {
    "device.cpu": {"device.in_use": ["cpu"], "model.device_map": "cpu"},
    "device.mps": {"device.in_use": ["mps"], "model.device_map": "mps", "os.macos_version": "15.1"},
    "device.rocm": {"device.in_use": ["cuda"], "rocm.version": "6.4"},
    "device.xpu": {"device.in_use": ["xpu"]},
    "fp32": {"model.dtype": "float32", "logits.dtype": "float32"},
    "fp16": {"model.dtype": "float16", "logits.dtype": "float16"},
    "bf16": {"model.dtype": "bfloat16", "logits.dtype": "bfloat16"},
    "conv": {"model.module_kinds": ["conv"]}, "rnn": {"model.module_kinds": ["rnn"]}, "moe": {"model.module_kinds": ["moe"]},
    "sample": {"generation.do_sample": True, "generation.mode": "sample", "rng.consumed": True},
    "beam": {"generation.num_beams": 4, "generation.mode": "beam_search"},
    "assisted": {"generation.mode": "assisted_generation", "generation.prompt_lookup_num_tokens": 3},
    "contrastive": {"generation.mode": "contrastive_search"}, "compile": {"torch.compile.active": True},
    "quantized": {"model.quantization_config.quant_method": "bitsandbytes"}, "adapter": {"adapter.names": ["style"]},
    "distributed": {"env.WORLD_SIZE": "2"}, "flash": {"model.attn_implementation": "flash_attention_2"},
    "sdpa": {"model.attn_implementation": "sdpa"}, "static_cache": {"generation.cache_implementation": "static"},
    "encdec": {"model.is_encoder_decoder": True}, "training": {"model.training": True},
    "deterministic": {"torch.deterministic_algorithms": True}, "batch.size>1": {"batch.size": 4},
    "guidance": {"generation.guidance_scale": 1.5}, "watermark": {"generation.watermarking_config": {"bias": 2.5}},
    "autocast": {"torch.autocast.cuda": "torch.bfloat16"}, "input.empty": {"input.empty": True},
}  # fmt: skip


def satisfy(condition: str, fields: dict[str, Field], runtime: str) -> None:
    """Make a condition of the catalogue hold on a run, by what its words stand for."""
    run = Run("", "call", runtime, "generate", "ok", 0, 0, fields, ())
    if conditions.active(condition, run) is not False:
        return
    for word in condition.split("|", maxsplit=1)[0].split("&"):
        if conditions.truth(word, run) is not False:
            continue
        if word == "device.cuda":
            on_cuda(fields)
        for name, value in WORDS.get(word, {}).items():
            fields[name] = Field(name, value)
        if word.startswith("lib."):
            package = f"lib.{conditions.LIBRARIES.get(word[4:], word[4:])}.version"
            fields[package] = Field(package, "1.4.2")


def known(fields: dict[str, Field]) -> list[str]:
    """Name the fields that hold something, or that nobody set."""
    return sorted(name for name, item in fields.items() if item.state in (State.VALUE, State.UNSET))
