"""Which fields differ between two runs, and which of them say one thing.

Unknown is never equal: a field that one run lacks, or could not read, is no difference and no agreement; it is
listed with its reason. Fields that follow from one another are grouped, and a group is ranked by its most
direct member.
"""

from collections.abc import Mapping
from typing import NamedTuple

from provenance.facts import Field, Run, Sequence, State


class Difference(NamedTuple):
    """A field that both runs know, and that is not the same."""

    name: str
    a: Field
    b: Field


class Blind(NamedTuple):
    """A field that cannot be compared, and why."""

    name: str
    because: str
    one_sided: bool = True  # one run knows it, and the other does not


# First the member that says it most directly; the rest follow from it or set it.
GROUPS: tuple[tuple[str, ...], ...] = (
    ("batch.size", "batch.max_length", "batch.padding_tokens", "batch.padding_side", "batch.sequence_lengths",
     "batch.position", "batch.mask_given", "batch.mask_origin", "batch.num_beams_rows", "tokenizer.padding_side"),
    ("torch.num_threads", "env.OMP_NUM_THREADS", "env.MKL_NUM_THREADS", "mkl.num_threads", "loaded.openmp.runtime",
     "cpu.affinity", "cpu.count_logical", "cpu.count_physical", "cpu.threads_per_core", "torch.num_interop_threads",
     "env.OPENBLAS_NUM_THREADS"),
    ("cpu.capability", "env.ATEN_CPU_CAPABILITY", "cpu.isa", "cpu.model", "cpu.vendor", "cpu.flags_digest",
     "cpu.caches", "cpu.microcode"),
    ("torch.version", "torch.git_version", "torch.build_config_digest", "torch.blas", "torch.lapack", "torch.compiler",
     "torch.parallel_backend", "mkl.version", "onednn.version", "openmp.version", "cuda.runtime_version",
     "cudnn.version", "cublas.version", "cublaslt.version", "nccl.version", "lib.triton.version", "torch.debug_build",
     "loaded.torch_cpu", "loaded.torch_cuda", "loaded.torch_python", "loaded.c10", "loaded.c10_cuda", "loaded.cudnn",
     "loaded.cublas", "loaded.cublaslt", "loaded.nccl", "loaded.cudnn.version", "loaded.nccl.version", "loaded.onednn",
     "loaded.openmp", "loaded.mkl"),
    ("model.training", "model.dropout_active"),
    ("model.forward_hooks", "model.forward_hooks_code"),
    ("model.attn_implementation", "model.attention_functions", "model.mask_functions"),
    ("torch.compile.active", "torch.compile.modules", "torch.compile.mode_backend"),
    ("model.quantization_config.quant_method", "model.quantization_config.bits"),
    ("generation.logits_processor", "generation.logits_processor_values", "generation.logits_processor_code",
     "generation.logits_processors"),
    ("generation.stopping_criteria", "generation.stopping_criteria_values", "generation.stopping_criteria_code"),
    ("generation.prefix_allowed_tokens_fn", "generation.prefix_allowed_tokens_fn_code"),
    ("generation.custom_generate", "generation.custom_generate_code"),
    ("gpu.driver_version", "gpu.cuda_driver_api_version"),
    ("model.dtype", "logits.dtype"),
    ("weights.loaded_root", "weights.sha256"),
    ("torch.deterministic_algorithms", "torch.deterministic_warn_only", "torch.deterministic_debug_mode",
     "torch.fill_uninitialized_memory"),
    ("torch.backends.cuda.matmul.fp32_precision", "torch.backends.cuda.matmul.allow_tf32",
     "torch.float32_matmul_precision", "torch.fp32_precision", "env.NVIDIA_TF32_OVERRIDE",
     "env.TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
    ("rng.torch_cpu_state_sha256", "seed.torch_initial", "rng.torch_cuda_state_sha256", "rng.torch_mps_state_sha256",
     "seed.given", "rng.consumed"),
    ("rng.batch_shape_at_sampling", "rng.row_at_sampling"),
    ("tokenizer.is_fast", "tokenizer.class", "tokenizer.add_bos", "tokenizer.special_ids",
     "tokenizer.added_tokens_digest", "tokenizer.sha256", "tokenizer.vocab_size"),
    ("lib.transformers.version", "model.source_digest"),
    ("llama_cpp.type_k", "llama_cpp.type_v"),
    ("torch.backends.cuda.flash_sdp_enabled", "torch.backends.cuda.mem_efficient_sdp_enabled",
     "torch.backends.cuda.cudnn_sdp_enabled", "torch.backends.cuda.math_sdp_enabled", "torch.sdp_priority_order",
     "torch.overrideable_sdp_enabled", "model.attention_backend_resolved_sdpa"),
)  # fmt: skip
GROUP = {name: group for group in GROUPS for name in group}
HOLES = "batch.mask_holes"
SHAPE, DRAWS = "rng.batch_shape_at_sampling", "rng.row_at_sampling"
# Recorded only where a caller gave it: where the other settings of a call are known, absence says that nobody did.
GIVEN = frozenset(f"generation.{name}" for name in (
    "logits_processor", "logits_processor_values", "stopping_criteria", "stopping_criteria_values",
    "prefix_allowed_tokens_fn", "assistant_model", "custom_generate", "negative_prompt_ids", "synced_gpus", "streamer",
    "logits_processor_code", "stopping_criteria_code", "prefix_allowed_tokens_fn_code", "constraints_code",
    "custom_generate_code",
)) | {"batch.position_ids_sha256"}  # fmt: skip
# What stood beside the ids is kept as content: a name, then type, shape and digest.
POSITIONS = {"position_ids": "batch.position_ids_sha256"}
# One device is one thing, whatever its number.
GPU = ("name", "compute_capability", "multi_processor_count", "memory_total", "l2_cache_size", "warp_size", "gcn_arch",
       "shared_memory_per_block", "mig_profile", "mig_mode", "mig_gpu_slices", "mig_compute_slices",
       "mig_multiprocessors", "mig_memory_mb")  # fmt: skip


def group_of(name: str) -> tuple[str, ...]:
    """Return the group of fields that say one thing with this one, most direct first.

    >>> group_of("gpu.1.memory_total")[:2], group_of("generation.top_p")
    (('gpu.1.name', 'gpu.1.compute_capability'), ('generation.top_p',))
    """
    head, _, rest = name.partition(".")
    number, _, last = rest.partition(".")
    if head == "gpu" and number.isdigit() and last in GPU:
        return tuple(f"gpu.{number}.{item}" for item in GPU)
    return GROUP.get(name, (name,))


def of_sequence(run: Run, sequence: Sequence) -> dict[str, Field]:
    """Return the fields of one sequence: those of its run, and its own place in the batch."""
    fields = dict(run.fields)
    fields["batch.position"] = Field("batch.position", sequence.row)
    shape = fields.get(SHAPE)
    if shape is not None and shape.state is State.VALUE:  # the run drew, and all its rows from one stream
        several = 1 + max((item.ret for item in run.sequences), default=0)
        fields[DRAWS] = Field(DRAWS, sequence.row * several + sequence.ret)
    if sequence.padding is not None:
        fields["batch.padding_tokens"] = Field("batch.padding_tokens", sequence.padding)
        if sequence.padding == 0 and "batch.padding_side" in fields:
            fields["batch.padding_side"] = Field.moot("batch.padding_side", "this prompt was not padded")
    for line in sequence.media:
        head, _, told = line.partition(" ")
        if (name := POSITIONS.get(head)) is not None:
            fields[name] = Field(name, told) if "sha256:" in told else Field.unknown(name, told)
    hidden = fields.get(HOLES)
    if hidden is not None and isinstance(hidden.value, list):  # a list of ranges for each row of the batch
        own = hidden.value[sequence.row] if sequence.row < len(hidden.value) else []
        fields[HOLES] = Field(HOLES, own) if own else Field.moot(HOLES, "nothing is hidden")
    return fields


def compare(a: Mapping[str, Field], b: Mapping[str, Field]) -> tuple[list[Difference], list[Blind]]:
    """Return the fields that differ and those that cannot be compared, each in the order of their names."""
    differing, blind = [], []
    for name in sorted(a.keys() | b.keys()):
        one, other = _found(name, a), _found(name, b)
        if one is None or other is None:
            there = one if one is not None else other
            told = there is not None and there.state is State.VALUE
            blind.append(Blind(name, f"not recorded in {'A' if one is None else 'B'}", told))
        elif not one.known or not other.known:
            told = State.VALUE in (one.state, other.state)
            blind.append(Blind(name, _reason(one, other), told))
        elif one != other and (side := _digested(one, other)):
            blind.append(Blind(name, f"kept as a keyed digest in {side} alone"))
        elif one != other:
            differing.append(Difference(name, one, other))
    return differing, blind


def _found(name: str, table: Mapping[str, Field]) -> Field | None:
    """Return a field as recorded; unset where it is recorded only if given, and the other settings are known."""
    mode = table.get("generation.mode")
    whole = name in GIVEN and mode is not None and mode.state is State.VALUE
    return table.get(name, Field.unset(name) if whole else None)


def _digested(one: Field, other: Field) -> str:
    """Return the run that kept a keyed digest where the other kept the content itself; empty where neither did."""
    sealed = [isinstance(item.value, str) and item.value.startswith("hmac:") for item in (one, other)]
    if sealed[0] == sealed[1] or not one.value or not other.value:
        return ""
    return "A" if sealed[0] else "B"


def _reason(one: Field, other: Field) -> str:
    sides = [(side, item) for side, item in (("A", one), ("B", other)) if not item.known]
    if len(sides) == 2 and one.reason == other.reason and one.state is other.state:
        return f"{_word(one)} in both: {one.reason}"
    return "; ".join(f"{_word(item)} in {side}: {item.reason}" for side, item in sides)


def _word(item: Field) -> str:
    return "withheld" if item.state is State.REDACTED else "not known"


def document(item: Field) -> object:
    """Return a field's value for the answer, or its state and reason."""
    if item.state is State.VALUE:
        return item.value
    return {"state": item.state.value, "reason": item.reason} if item.reason else {"state": item.state.value}
