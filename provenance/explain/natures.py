"""What kind of thing a field is, and how well that goes with what the tokens show.

The catalogue says what a difference can do (effect) and on what it acts (dimension). Evidence speaks a coarser
language: did the input change, did the logits move and how far, was the choice a near tie, was it drawn. This table
joins the two; its numbers are judgements to start from, checked by `scripts/bench explain` on cases with known causes.
"""

# ruff: noqa: E501 - a table reads better with one row a line

import re
from collections.abc import Callable

from provenance.catalogue.fields import Spec

# A number below this is a ruling: the evidence speaks against it, and the field is dismissed with that sentence.
RULED_OUT = 0.05
# A field that the catalogue does not know may be anything: a suspect at the end of every line.
STRANGE = 0.25

STOPPING = re.compile(r"max_(new_)?tokens|max_length|max_time|max_completion|min_(new_)?tokens|min_length|\.stop|stop_|eos|ignore_eos"
                      r"|early_stopping|finish")  # fmt: skip
CONTEXT = re.compile(r"truncat|n_ctx|num_ctx|max_model_len|context_length|model_max_length|prompt_eval")
TEMPLATE = re.compile(
    r"chat_template|chat_format|tools|system_prompt|rendered|START_DATE|messages|enable_thinking|retrieval"
)
TOKENIZER = re.compile(r"tokenizer|tokenizers|sentencepiece|tiktoken|mistral-common|FASTOKENS|use_fast")
PRECISION = re.compile(
    r"dtype|quant|fp8|tf32|TF32|precision|type_k|type_v|reduced_precision|fp16|bf16|bits|autocast|FPMATH"
)
MASK = re.compile(r"attention_mask|position_ids|mask_given|mask_origin|mask_holes")
FUNCTION = re.compile(r"lora|rope|override|revision|load_format|adapter|weight|sliding|model_impl|model_path|experts$")

# Code that computes one function in another way: it can hold another mask, window or cache, not only other rounding.
IMPLEMENTATION = re.compile(r"attn_implementation|experts_implementation|use_kernels|attention_(config\.)?backend|model_impl|use_cache"
                            r"|cache_implementation|moe_backend|flash_attn$|speculative|compile\.active|enforce_eager")  # fmt: skip
# Where parts of a model lie, and how they are carried over.
PLACEMENT = re.compile(
    r"device_map|offload|topology|tensor_parallel|tp_size|pipeline_parallel|split_mode|tensor_split|n_gpu_layers"
)
PADDING = re.compile(r"padding_side")

NATURES = ("input", "template", "tokenizer", "context", "mask", "padding", "function", "precision", "kernel",
           "implementation", "placement", "library", "code", "order", "decoding", "stop", "random", "dropout", "service",
           "stranger")  # fmt: skip


def nature(declared: Spec) -> str:
    """Say what kind of thing a field is.

    >>> from provenance.catalogue.fields import spec
    >>> [nature(spec(name)) for name in ("batch.size", "model.dtype", "generation.top_p", "gpu.0.name", "weights.loaded_root")]
    ['kernel', 'precision', 'decoding', 'kernel', 'function']
    """
    name, group = declared.name, declared.group
    if PADDING.search(name):
        return "padding"
    for kind, pattern in (("implementation", IMPLEMENTATION), ("placement", PLACEMENT)):
        if pattern.search(name) and declared.effect == "numeric":
            return kind
    if name in ("env.PYTHONHASHSEED", "python.hash_randomization"):
        return "order"
    if name in ("model.training", "model.dropout_probs", "model.dropout_active", "adapters.dropout"):
        return "dropout"
    if declared.effect == "random":
        return "random"
    return "stranger" if group == "other" else GROUPS.get(group, _other)(declared)


def _batch(declared: Spec) -> str:
    return "mask" if MASK.search(declared.name) else "kernel"


def _model(declared: Spec) -> str:
    if declared.dimension == "weights":
        return "function"
    return "precision" if declared.dimension == "precision" else "kernel"


def _other(declared: Spec) -> str:
    if declared.effect == "semantic":
        return "code"
    return "precision" if declared.dimension == "precision" or PRECISION.search(declared.name) else "kernel"


def _library(declared: Spec) -> str:
    name = declared.name
    if name in ("app.code_version", "lib.editable_installs", "python.utf8_mode"):
        return "code"
    if name == "lib.jinja2.version":
        return "template"
    if name.startswith("lib.") and TOKENIZER.search(name):
        return "tokenizer"
    is_package = name.startswith("lib.") and name.endswith(".version")
    return "library" if is_package or name == "torch.version" else "kernel"


def _before(declared: Spec) -> str:
    """Sort what acts before the model sees anything."""
    name = declared.name
    if CONTEXT.search(name):
        return "context"
    if TEMPLATE.search(name):
        return "template"
    if name.startswith("tokenizer."):
        return "tokenizer"
    return "kernel" if name == "input.past_key_values_given" else "input"


def _decoding(declared: Spec) -> str:
    if STOPPING.search(declared.name):
        return "stop"
    return "kernel" if declared.effect == "numeric" else "decoding"


def _engine(declared: Spec) -> str:
    """Sort the rows of an engine or a service, whose groups hold everything at once."""
    name = declared.name
    for kind, pattern in (("context", CONTEXT), ("template", TEMPLATE), ("tokenizer", TOKENIZER), ("stop", STOPPING)):
        if pattern.search(name):
            return kind
    if declared.dimension == "service":
        return "decoding" if name.startswith("service.request.") and declared.effect == "semantic" else "service"
    if declared.effect == "semantic":
        decoding = "sampl" in name or "penalt" in name or "temperature" in name or declared.dimension == "parameters"
        return "decoding" if decoding and not FUNCTION.search(name) else "function"
    return "precision" if PRECISION.search(name) else "kernel"


GROUPS: dict[str, Callable[[Spec], str]] = {
    "libraries": _library, "input": _before, "tokenizer": _before, "batch": _batch, "weights": lambda _: "function",
    "model": _model, "generation": _decoding, "seeds_rng": _decoding, "service": _engine, "runtime_engine": _engine,
}  # fmt: skip

# They compute something else, and not one thing in another order.
FUNCTIONAL = frozenset({"function", "dropout", "mask", "input", "decoding", "stop", "random"})

# Where the inputs differ already.
INPUTS = ("prompt", "ids, no text")
# [what the tokens show][nature]. What is not named fits not at all.
FIT: dict[str, dict[str, float]] = {
    # the rendered prompts differ
    "prompt": {"order": 0.6, "mask": 0.9, "input": 1.0, "template": 1.0, "context": 0.9, "code": 0.4, "service": 0.35, "library": 0.35,
               "tokenizer": 0.25, "random": 0.15, "decoding": 0.03, "function": 0.03},
    # other ids; the text beside them was made from them, and cannot tell what made them
    "ids, no text": {"order": 0.4, "padding": 0.3, "mask": 0.9, "tokenizer": 1.0, "template": 0.9, "context": 0.9, "input": 0.8, "library": 0.45, "code": 0.3,
                     "service": 0.3, "random": 0.1, "function": 0.05},
    # equal ids out, other text
    "text": {"tokenizer": 1.0, "service": 0.8, "library": 0.5, "code": 0.3, "template": 0.1},
    # equal logits to the last bit
    "zero": {"decoding": 1.0, "stop": 0.25, "service": 0.3, "library": 0.15, "code": 0.1, "random": 0.06},
    # logits moved by as little as rounding moves them, and the choice hung on that; another function can move them so too
    "tie": {"implementation": 1.0, "placement": 0.9, "padding": 1.0, "kernel": 1.0, "library": 0.6, "precision": 0.5, "service": 0.4, "mask": 0.15, "decoding": 0.08,
            "function": 0.5, "input": 0.06, "dropout": 0.05, "code": 0.03},
    "tie, other precision": {"implementation": 0.4, "placement": 0.4, "padding": 0.4, "precision": 1.0, "kernel": 0.4, "library": 0.4, "service": 0.3, "function": 0.3,
                             "mask": 0.1, "decoding": 0.06, "input": 0.06, "dropout": 0.05},
    # logits moved by rounding, and the margin was wide: the choice was made otherwise
    "rounding": {"implementation": 0.06, "placement": 0.06, "padding": 0.06, "decoding": 1.0, "stop": 0.15, "service": 0.25, "library": 0.12, "code": 0.08, "precision": 0.06},
    # logits moved further than rounding can
    "large": {"implementation": 0.35, "placement": 0.2, "padding": 1.0, "function": 1.0, "mask": 0.8, "precision": 0.8, "dropout": 0.8, "input": 0.6, "code": 0.15, "service": 0.5,
              "library": 0.4, "context": 0.1, "decoding": 0.06, "kernel": 0.03},
    "large, low precision": {"implementation": 0.4, "placement": 0.3, "padding": 1.0, "function": 1.0, "mask": 0.8, "precision": 0.9, "dropout": 0.8, "input": 0.6, "code": 0.15,
                             "service": 0.5, "library": 0.5, "context": 0.1, "decoding": 0.06, "kernel": 0.3},
    "large, overruled": {"implementation": 0.15, "placement": 0.1, "padding": 0.2, "decoding": 1.0, "function": 0.8, "precision": 0.4, "mask": 0.4, "library": 0.4, "service": 0.4,
                         "code": 0.15, "dropout": 0.3, "input": 0.3},
    # no evidence of tokens
    "unknown": {"implementation": 0.75, "placement": 0.6, "padding": 0.7, "order": 0.1, "function": 0.9, "decoding": 0.9, "precision": 0.8, "service": 0.8, "dropout": 0.7, "kernel": 0.7,
                "library": 0.7, "mask": 0.6, "input": 0.5, "code": 0.25, "context": 0.4, "stop": 0.2, "random": 0.15,
                "template": 0.15, "tokenizer": 0.15},
    # one output is the beginning of the other
    "stop": {"stop": 1.0, "service": 0.3, "context": 0.3, "decoding": 0.15, "library": 0.1, "code": 0.1},
    # tokens were drawn: by another stream, or from other logits
    "drawn": {"implementation": 0.35, "placement": 0.35, "padding": 0.4, "order": 0.1, "random": 1.0, "decoding": 0.8, "function": 0.5, "service": 0.5, "precision": 0.4, "dropout": 0.4, "mask": 0.4,
              "library": 0.4, "kernel": 0.35, "code": 0.2, "input": 0.3},
    "drawn, equal logits": {"random": 1.0, "decoding": 0.8, "service": 0.3, "library": 0.2, "code": 0.1},
    "drawn, rounding": {"implementation": 0.5, "placement": 0.4, "padding": 0.5, "random": 1.0, "decoding": 0.6, "kernel": 0.5, "library": 0.4, "precision": 0.4, "service": 0.3,
                        "function": 0.4, "mask": 0.2, "dropout": 0.2, "input": 0.1},
    "drawn, large": {"implementation": 0.3, "placement": 0.2, "padding": 0.6, "function": 1.0, "precision": 0.7, "dropout": 0.8, "mask": 0.7, "random": 0.4, "decoding": 0.3,
                     "service": 0.5, "library": 0.4, "code": 0.15, "input": 0.5},
    # drawn by one stream: the stream is no cause
    "drawn alike": {"implementation": 0.7, "placement": 0.6, "padding": 0.7, "decoding": 1.0, "function": 0.7, "kernel": 0.7, "precision": 0.7, "library": 0.6, "service": 0.5,
                    "dropout": 0.5, "mask": 0.5, "code": 0.2, "input": 0.3},
    "drawn alike, equal logits": {"implementation": 0.06, "padding": 0.06, "decoding": 1.0, "library": 0.3, "service": 0.3, "code": 0.12, "kernel": 0.06},
    "drawn alike, rounding": {"implementation": 1.0, "placement": 0.9, "padding": 1.0, "kernel": 1.0, "decoding": 0.5, "precision": 0.7, "library": 0.6, "service": 0.4,
                              "function": 0.7, "mask": 0.3, "dropout": 0.2, "input": 0.1},
    "drawn alike, large": {"implementation": 0.35, "placement": 0.2, "padding": 0.7, "function": 1.0, "precision": 0.8, "dropout": 0.8, "mask": 0.8, "library": 0.4, "service": 0.5,
                           "code": 0.15, "input": 0.6, "decoding": 0.06},
}  # fmt: skip


def fit(kind: str, declared: Spec) -> float:
    """Say how well a field goes with what the tokens show, from 0 to 1."""
    what = nature(declared)
    return STRANGE if what == "stranger" else FIT[kind].get(what, 0.0)
