"""What to do about an answer: the setting that removes a cause, what it costs, and the command that would prove it.

The catalogue says how each field is set; what holding it still costs is said here, for the families of fields that
people can do something about. Only commands that exist are named, and an id goes into a command only if it is one.
"""

import re
from typing import Any, NamedTuple

from provenance.catalogue.fields import spec
from provenance.explain.calls import Endings, Parted
from provenance.explain.conditions import value
from provenance.explain.own import looks
from provenance.explain.rules import Pair

BLIND_SPOTS = [
    "an edit of the weights through .data after they were hashed",
    "position ids given to a call whose content was not kept",
]
NO_TOGGLE = ("", "-", "none")
IDENTIFIER = re.compile(r"[0-9A-Za-z-]{1,64}")


class Remedy(NamedTuple):
    """What holds a family of fields still, and what that costs."""

    names: tuple[str, ...]  # beginnings of names; the first family that fits is taken
    setting: str
    cost: str


NOTHING = "nothing"
REMEDIES: tuple[Remedy, ...] = (
    Remedy(("batch.padding_side", "tokenizer.padding_side"),
           "pad on one side: tokenizer.padding_side = 'left' for a model that goes on writing at the right", NOTHING),
    Remedy(("batch.mask", "batch.attention_mask", "batch.position_ids"),
           "pass the attention_mask that the tokenizer made together with the ids", NOTHING),
    Remedy(("batch.", "vllm.scheduler_config.", "sglang.max_running_requests", "sglang.chunked_prefill_size"),
           "run the prompt in one batch shape and padding every time, alone or beside a fixed number of prompts",
           "throughput, because prompts no longer share a forward pass as they arrive"),
    Remedy(("torch.num_threads", "torch.num_interop_threads", "env.OMP_NUM_THREADS", "env.MKL_NUM_THREADS",
            "env.OPENBLAS_NUM_THREADS", "cpu.affinity", "cpu.count"),
           "call torch.set_num_threads(n) with one n on every machine", "speed where a machine has more cores than n"),
    Remedy(("cpu.", "env.ATEN_CPU_CAPABILITY"),
           "compare on one type of processor, or set ATEN_CPU_CAPABILITY to the least of them before the start",
           "speed, because the widest vectors stay unused"),
    Remedy(("gpu.", "device."), "serve the model from one type of device", "freedom of placement"),
    Remedy(("model.dtype", "torch.autocast", "logits.dtype"),
           "name the type yourself with dtype= in from_pretrained, and run no autocast around the call",
           "twice the memory, if the type you name is float32 and it was a half type"),
    Remedy(("torch.deterministic", "torch.fill_uninitialized_memory", "env.CUBLAS_WORKSPACE_CONFIG"),
           "call torch.use_deterministic_algorithms(True) at the start, with CUBLAS_WORKSPACE_CONFIG=:4096:8 on CUDA",
           "speed, and an error where an operator has no deterministic form"),
    Remedy(("torch.backends.", "torch.float32_matmul_precision", "torch.fp32_precision", "env.NVIDIA_TF32_OVERRIDE",
            "env.TORCH_ALLOW_TF32"),
           "set the switch at the start of every process instead of leaving it to a default",
           "speed, where the exact setting turns a faster kernel off"),
    Remedy(("model.attn_implementation", "torch.nn.attention"),
           "name the attention with attn_implementation= in from_pretrained",
           "memory and speed on long prompts, if the one you name is eager"),
    Remedy(("torch.compile", "torch.inductor", "env.TORCHINDUCTOR", "env.TORCH_COMPILE"),
           "run without compilation (TORCH_COMPILE_DISABLE=1), or with one configuration and one cache", "speed"),
    Remedy(("rng.row_at_sampling", "rng.batch_shape_at_sampling"),
           "give the prompt a call of its own, with torch.manual_seed(n) before it, or the same row of the same batch",
           "throughput, if prompts no longer share a forward pass"),
    Remedy(("rng.", "seed."), "seed before each call: torch.manual_seed(n)",
           "variety, because equal prompts then draw equal answers"),
    Remedy(("generation.logits_processor", "generation.stopping_criteria", "generation.prefix_allowed_tokens_fn",
            "generation.custom_generate"),
           "hand the same code with the same values to every call", NOTHING),
    Remedy(("generation.",),
           "pass it with every call instead of leaving it to the library or the checkpoint's generation_config.json",
           NOTHING),
    Remedy(("model.forward_hooks",), "take the hooks off before the call (handle.remove()), or attach the same ones",
           "what the hooks were there for"),
    Remedy(("model.monkey_patched",),
           "start a process that does not load the package that patches, or patch both alike",
           "what the patch was there for"),
    Remedy(("model.training", "model.dropout", "adapters.dropout"), "call model.eval() before generate", NOTHING),
    Remedy(("model.quantization_config.",), "load one quantisation everywhere, made by one version of one library",
           "memory and speed, if the form that you settle on is the wider one"),
    Remedy(("model.source_digest", "model.class", "model.code_revision"),
           "run one version of the model's code: pin transformers, or code_revision= where the code is remote",
           "updates that come only when you ask for them"),
    Remedy(("model.config_digest", "model.rope_", "model.sliding_window", "model.max_position_embeddings",
            "model.tied_weights", "model.norm_eps", "model.attention_scaling", "model.logit_scaling",
            "model.activation"),
           "load one configuration: one revision=, and no overrides in from_pretrained", NOTHING),
    Remedy(("model.device_map", "model.offload", "model.tp_size"), "place the model alike: one device_map= everywhere",
           "freedom of placement"),
    Remedy(("model.experts_implementation", "model.use_kernels", "model.attention_backend", "model.previous_max_cache"),
           "choose the operators yourself, alike in every process", "speed, where the faster kernel is given up"),
    Remedy(("model.buffer_dtypes",), "cast in from_pretrained with dtype= and not afterwards with model.to(dtype)",
           NOTHING),
    Remedy(("adapter",), "attach one adapter of one revision, with one scaling, merged everywhere or nowhere", NOTHING),
    Remedy(("weights.", "model.", "files."), "load one revision everywhere: revision=COMMIT in from_pretrained",
           "updates that come only when you ask for them"),
    Remedy(("tokenizer.decode_flags", "tokenizer.clean_up_tokenization_spaces"),
           "decode with one set of flags: skip_special_tokens= and clean_up_tokenization_spaces=", NOTHING),
    Remedy(("tokenizer.", "chat_template.", "input."), "send the same token ids: one tokenizer, template and prompt",
           NOTHING),
    Remedy(("torch.version", "torch.git_version", "lib.", "python.", "mkl.", "onednn.", "openmp.", "cuda.", "cudnn.",
            "cublas.", "nccl.", "rocm.", "os."),
           "pin it: one image everywhere; `provenance lock` writes down what holds and `provenance check` compares",
           "updates that become a step of their own"),
    Remedy(("env.",), "export it before the process starts, on every machine", NOTHING),
)  # fmt: skip


def remedy(name: str) -> tuple[str, str]:
    """Return the setting that holds a field still, and its cost.

    >>> remedy("rng.torch_cpu_state_sha256")[0], remedy("vllm.model_config.dtype")[1]
    ('seed before each call: torch.manual_seed(n)', 'nothing, once every process is started with it')
    """
    for item in REMEDIES:
        if name.startswith(item.names):
            return item.setting, item.cost
    return f"give {name} one value everywhere", "nothing, once every process is started with it"


def steps(cause: dict[str, Any], other: str, again: str = "run A's prompt again") -> list[str]:
    """Say how to remove a cause, what that costs, and how to prove it; ``other`` is the run B."""
    name = cause["field"]
    setting, cost = remedy(name)
    toggle = spec(name).toggle
    how = f" ({toggle})" if toggle not in NO_TOGGLE else ""
    proof = (
        f"To prove it, {again} with {name} as in B{how}, all else as in A: if "
        f"`provenance diff {identifier(other)} last` says same, that was it."
    )
    return [f"To remove the cause, {setting}. It costs {cost}.", proof]


def tie(pair: Pair, causes: list[dict[str, Any]]) -> list[str]:
    """Say what a near tie means: neither output is wrong only where what moved the logits is known to be harmless."""
    if not causes:
        return ["The two best tokens were as good as tied, so that little was enough to turn the choice."]
    said = "The two best tokens were as good as tied, and rounding turned the choice: neither output is wrong"
    files = [run.fields.get("weights.files_root") for run in (pair.a, pair.b)]
    known = all(item is not None and item.known for item in files) and files[0] == files[1]
    if pair.weights_equal is None and not known:
        said += ", if both ran on the same weights, which was not recorded"
    shape = causes[0]["field"].startswith("batch.")
    more = " To get one of them every time, run the prompt in the same batch shape and padding." if shape else ""
    return [f"{said}.{more}"]


def unexplained(pair: Pair, unknown: list[dict[str, Any]]) -> str:
    """Say that nothing recorded explains it, what would have had to be recorded, and what no field holds."""
    deciding = [item["field"] for item in unknown if item["would_decide"]]
    likely = [*deciding[:5], *_opaque(pair), *_unseen(pair)] or [item["field"] for item in unknown[:3]]
    said = "Unexplained: something that decides was not recorded"
    said += f"; the likeliest are {', '.join(likely)}." if likely else "."
    if pair.function:
        return (
            f"{said} A function can read what is no argument of it: globals, files, the clock, what an object holds. "
            "Hand that in as a plain argument, or note it with run.set_field."
        )
    if pair.evidence.kind in ("rounding", "large"):
        if pair.repeats:
            said += " Equal runs give equal logits here, and these moved: no recorded difference accounts for that."
        said += " No field holds what a module keeps as a plain attribute (a scaling, a window): compare those by hand."
    return said


def _unseen(pair: Pair) -> list[str]:
    """Name what no reader of a model sees, where the logits may have moved."""
    if pair.function or pair.a.runtime != "transformers" or pair.evidence.kind not in ("large", "rounding", "unknown"):
        return []
    return BLIND_SPOTS


def excused(excuse: list[dict[str, Any]]) -> list[str]:
    """Say that what was declared explains it; the exit code stays that of the verdict."""
    names = ", ".join(item["field"] for item in excuse)
    return [f"The declared difference explains it: {names}. `--allow` in place of `--vary` lets the comparison pass."]


def arguments(parted: list[Parted], other: str) -> list[str]:
    """Say how to compare two calls of a function that was asked two things."""
    if not parted:
        return ["To compare what the function does, call it twice with equal arguments."]
    one = f"To see what {parted[0].path} alone does, call the function with it as in B and all else as in A"
    return [
        f"To compare what the function does, call it twice with equal arguments: {_paths(parted)} differed.",
        f"{one}, then `provenance diff {identifier(other)} last`.",
    ]


def _paths(parted: list[Parted]) -> str:
    names = [item.path for item in parted]
    return names[0] if len(names) == 1 else f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''}"


def own(causes: list[dict[str, Any]], other: str, again: str) -> list[str]:
    """Say how to find out whether a field of the caller's own acts; an identifier is not worth the run."""
    named = [item["field"] for item in causes if not looks(item["field"], item["a"], item["b"])]
    if not named:
        return []
    said = f"Whether {' or '.join(named[:3])} acts on an output, only a run can tell: {again} with it as in B"
    return [f"{said}, all else as in A, and see what `provenance diff {identifier(other)} last` says."]


def _opaque(pair: Pair) -> list[str]:
    """Name what was recorded from the outside alone: code of the caller's, whose workings no field holds."""
    tables = [run.fields for run in (pair.a, pair.b)]
    shaped = ("logits_processor", "prefix_allowed_tokens_fn", "custom_generate")
    stopped = ("stopping_criteria",) if pair.evidence.prefix else ()
    names = [f"generation.{name}" for name in (*shaped, *stopped)]
    found = [f"the values inside {name}" for name in names if any(value(fields, name) for fields in tables)]
    if pair.evidence.kind == "zero":
        return found
    inner = {"model.forward_hooks": "what the hooks of model.forward_hooks do",
             "model.monkey_patched": "what the code of model.monkey_patched does",
             "input.past_key_values_given": "what the cache that was handed in held"}  # fmt: skip
    return found + [said for name, said in inner.items() if any(value(fields, name) for fields in tables)]


def calm(run: str) -> list[str]:
    """Say what to do where nothing parts."""
    return [f"Nothing to do. `provenance lock --run {identifier(run)}` writes down what these outputs rest on."]


def failed(endings: Endings) -> list[str]:
    """Say what to do where a call did not end well: what it would have put out, nothing can tell."""
    one = "both calls" if endings.a and endings.b else "that call"
    return [f"{endings.told()}: mend that first, make {one} again, then compare."]


def blank() -> list[str]:
    """Say what to do where there are no outputs to compare."""
    return ["Record both runs with their outputs kept, then compare again."]


def identifier(run: str) -> str:
    """Return a run's id for a command, or a word in its place: an id from a file may be anything.

    >>> identifier("01a22fdc-8372"), identifier("x; rm -r .")
    ('01a22fdc-8372', 'RUN')
    """
    return run if IDENTIFIER.fullmatch(run) else "RUN"
