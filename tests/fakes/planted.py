"""Real divergences with a known cause: one thing is changed between two recorded runs, on real models on this CPU.

Each plant is a name, the fields of which one must be named first, and the two ways to run. Whether a numeric change turns a
choice depends on the processor: such a plant is tried on several prompts, and counts only where outputs really part.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import provenance

TINY = Path(__file__).parents[2] / "provenance" / "data" / "tiny"
PROMPTS = (
    "The for statement is used to", "A function", "The first argument", "If an exception occurs in the try clause, the rest",
    "A dictionary display yields a new", "The exception", "Return the value of", "A class definition is", "When the list is",
    "Strings are", "The with statement", "An import of the module",
)  # fmt: skip
LONG = "The try statement specifies exception handlers and cleanup code for a group of statements, so that it can"
TOKENS = 72
BATCH = ("batch.size", "batch.max_length", "batch.padding_tokens")
NUMERIC, SEMANTIC, MODEL = "numeric", "semantic", "another model"
Ask = Callable[["Bench", str], str]


@dataclass(frozen=True)
class Plant:
    """One planted cause."""

    name: str
    fields: tuple[str, ...]
    kind: str
    a: Ask
    b: Ask


class Bench:
    """The models of the plants, each loaded once and recorded; a call returns the id of its run, and the row of the prompt."""

    def __init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(TINY, padding_side="left")
        self._models: dict[str, Any] = {}
        self.made: list[list[int]] = []  # the new tokens of the first prompt of each call

    def model(self, name: str = "bfloat16", change: Callable[[Any], Any] | None = None, **options: Any) -> Any:
        """Load a model under a name; ``change`` is done to it before it is wrapped."""
        if name not in self._models:
            options.setdefault("dtype", torch.bfloat16)
            model = AutoModelForCausalLM.from_pretrained(TINY, **options).eval()
            if change is not None:
                model = change(model) or model
            self._models[name] = provenance.wrap(model, tokenizer=self.tokenizer)
        return self._models[name]

    def ask(self, prompt: str | list[str], model: Any = None, reads: Any = None, **options: Any) -> str:
        """Generate greedily unless told otherwise; the prompt comes first in a batch."""
        reads = reads or self.tokenizer
        given = dict(reads(prompt if isinstance(prompt, list) else [prompt], return_tensors="pt", padding=True))
        given.pop("token_type_ids", None)
        options = {"max_new_tokens": TOKENS, "do_sample": False, **options}
        if options.pop("no_mask", False):
            given.pop("attention_mask")
        with provenance.run() as block:
            out = (model if model is not None else self.model()).generate(**given, **options)
        self.made.append(_new(out[0].tolist(), given["input_ids"].shape[1], reads.pad_token_id))
        return block.run_id


def _new(row: list[int], prompt: int, pad: int | None) -> list[int]:
    """Return the tokens that were made, without the padding that a longer companion brings."""
    made = row[prompt:]
    while made and made[-1] == pad:
        made.pop()
    return made


def plain(bench: Bench, prompt: str) -> str:
    """Ask alone, in bfloat16, with the settings of the library."""
    return bench.ask(prompt)


def greedy(**options: Any) -> Ask:
    """Ask with other settings."""
    return lambda bench, prompt: bench.ask(prompt, **options)


def right(bench: Bench, prompt: str) -> str:
    """Ask in a batch that is padded on the right."""
    bench.tokenizer.padding_side = "right"
    try:
        return bench.ask([prompt, LONG])
    finally:
        bench.tokenizer.padding_side = "left"


def drawn(seed: int, **options: Any) -> Ask:
    """Ask by sampling, from a seed."""

    def ask(bench: Bench, prompt: str) -> str:
        torch.manual_seed(seed)
        return bench.ask(prompt, **{"do_sample": True, "temperature": 1.0, "top_k": 0, **options})

    return ask


def of(name: str, change: Callable[[Any], Any] | None = None, **options: Any) -> Ask:
    """Ask another model."""
    return lambda bench, prompt: bench.ask(prompt, model=bench.model(name, change, **options))


def held(block: Callable[[], Any], ask: Ask = plain) -> Ask:
    """Ask inside a block that changes the process and puts it back."""

    def inside(bench: Bench, prompt: str) -> str:
        with block():
            return ask(bench, prompt)

    return inside


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def flag(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def consumed(bench: Bench, prompt: str) -> str:
    """Draw from the stream before the call does."""
    torch.manual_seed(7)
    torch.rand(3)
    return bench.ask(prompt, do_sample=True, temperature=1.0, top_k=0)


def tokenizer(change: Callable[[Any], Any]) -> Ask:
    """Ask with a changed tokenizer, which the record knows of."""

    def ask(bench: Bench, prompt: str) -> str:
        other = copy.deepcopy(bench.tokenizer)
        other = change(other) or other
        model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16).eval()
        return bench.ask(prompt, model=provenance.wrap(model, tokenizer=other), reads=other)

    return ask


def weights(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a change of weights, done without a graph."""

    def inner(model: Any) -> Any:
        with torch.no_grad():
            return change(model)

    return inner


def nudge(model: Any) -> None:
    """Move every number of some matrices by one unit in the last place of its type."""
    for layer in model.model.layers:
        weight = layer.mlp.down_proj.weight
        weight.copy_((weight.view(torch.int16) + 1).view(weight.dtype))


def scale(model: Any) -> None:
    """Make one matrix four tenths larger."""
    model.model.layers[2].self_attn.o_proj.weight.mul_(1.4)


def bend(model: Any) -> None:
    """Store the frequencies of the rotary embedding in fewer digits."""
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.to(torch.float8_e5m2).float()
    if hasattr(rotary, "original_inv_freq"):
        rotary.original_inv_freq = rotary.inv_freq


def penalised(model: Any) -> None:
    """Supply a penalty from the model's own generation configuration."""
    model.generation_config.repetition_penalty = 1.3


def dropping(model: Any) -> None:
    """Leave the model in training mode, with dropout."""
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.2
    model.train()


def lower(other: Any) -> Any:
    """Let the tokenizer write everything small."""
    from tokenizers import normalizers

    other.backend_tokenizer.normalizer = normalizers.Lowercase()


def begins(other: Any) -> Any:
    """Let the tokenizer put a token in front."""
    from tokenizers.processors import TemplateProcessing

    first = other.convert_ids_to_tokens(0)
    other.bos_token = first
    other.backend_tokenizer.post_processor = TemplateProcessing(single=f"{first} $A", special_tokens=[(first, 0)])


MKLDNN: Any = torch.backends.mkldnn
PLANTS: tuple[Plant, ...] = (
    # numeric
    Plant("batch", BATCH, NUMERIC, plain, lambda b, p: b.ask([p, "A b", "Return", "The"])),
    Plant("padding", BATCH, NUMERIC, plain, lambda b, p: b.ask([p, LONG])),
    Plant("larger batch", BATCH, NUMERIC, lambda b, p: b.ask([p, LONG]), lambda b, p: b.ask([p, *[LONG] * 7])),
    Plant("attention", ("model.attn_implementation",), NUMERIC, plain, of("eager", attn_implementation="eager")),
    Plant("no cache", ("generation.use_cache",), NUMERIC, plain, greedy(use_cache=False)),
    Plant("static cache", ("generation.cache_implementation",), NUMERIC, plain, greedy(cache_implementation="static")),
    Plant("prefill in parts", ("generation.prefill_chunk_size",), NUMERIC, plain, greedy(prefill_chunk_size=3)),
    Plant("dtype", ("model.dtype",), NUMERIC, of("float32", dtype=torch.float32), plain),
    Plant("half", ("model.dtype",), NUMERIC, plain, of("float16", dtype=torch.float16)),
    Plant("autocast", ("torch.autocast.cpu",), NUMERIC, of("float32", dtype=torch.float32),
          held(lambda: torch.autocast("cpu", torch.bfloat16), of("float32", dtype=torch.float32))),
    Plant("threads", ("torch.num_threads",), NUMERIC, plain, held(lambda: threads(2))),
    Plant("no oneDNN", ("torch.backends.mkldnn.enabled",), NUMERIC, plain, held(lambda: flag(MKLDNN, "enabled", False))),
    Plant("no flash", ("torch.backends.cuda.flash_sdp_enabled",), NUMERIC, plain,
          held(lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH))),
    Plant("a unit in the last place", ("weights.loaded_root",), MODEL, plain, of("nudged", weights(nudge))),
    Plant("a draft", ("generation.assistant_model", "generation.mode"), NUMERIC, plain,
          lambda b, p: b.ask(p, assistant_model=b.model("draft", weights(scale)))),
    # another function
    Plant("weights", ("weights.loaded_root",), MODEL, plain, of("scaled", weights(scale))),
    Plant("frequencies", ("weights.loaded_root",), MODEL, plain, of("bent", weights(bend))),
    Plant("training", ("model.training",), SEMANTIC, plain, of("training", dropping)),
    Plant("rope", ("model.rope_parameters", "model.config_digest", "weights.loaded_root"), SEMANTIC, plain,
          of("rope", rope_parameters={"rope_type": "default", "rope_theta": 9000.0})),
    Plant("epsilon", ("model.norm_eps",), SEMANTIC, plain, of("epsilon", rms_norm_eps=1.3e-6)),
    Plant("epsilon beside a batch", ("model.norm_eps",), SEMANTIC, plain,
          lambda b, p: b.ask([p, LONG], model=b.model("epsilon", rms_norm_eps=1.3e-6))),
    Plant("right padding", ("batch.padding_side",), SEMANTIC, plain, right),
    Plant("another side", ("batch.padding_side",), SEMANTIC, lambda b, p: b.ask([p, LONG]), right),
    Plant("mask", ("batch.mask_given",), SEMANTIC, lambda b, p: b.ask([p, LONG]),
          lambda b, p: b.ask([p, LONG], no_mask=True, pad_token_id=5)),
    # settings
    Plant("repetition penalty", ("generation.repetition_penalty",), SEMANTIC, plain, greedy(repetition_penalty=1.2)),
    Plant("penalty of the checkpoint", ("generation.repetition_penalty",), SEMANTIC, plain, of("penalised", penalised)),
    Plant("no repeat", ("generation.no_repeat_ngram_size",), SEMANTIC, plain, greedy(no_repeat_ngram_size=2)),
    Plant("bad words", ("generation.bad_words_ids",), SEMANTIC, plain, greedy(bad_words_ids=[[n] for n in range(260, 420)])),
    Plant("suppressed", ("generation.suppress_tokens",), SEMANTIC, plain, greedy(suppress_tokens=list(range(260, 420)))),
    Plant("bias", ("generation.sequence_bias",), SEMANTIC, plain,
          greedy(sequence_bias={(n,): -9.0 for n in range(260, 420)})),
    Plant("beams", ("generation.num_beams", "generation.mode"), SEMANTIC, plain, greedy(num_beams=3)),
    Plant("sampling", ("generation.do_sample", "generation.mode"), SEMANTIC, plain, drawn(1)),
    Plant("temperature", ("generation.temperature",), SEMANTIC, drawn(3), drawn(3, temperature=0.4)),
    Plant("top k", ("generation.top_k",), SEMANTIC, drawn(4), drawn(4, top_k=2)),
    Plant("top p", ("generation.top_p",), SEMANTIC, drawn(5), drawn(5, top_p=0.3)),
    Plant("seed", ("rng.torch_cpu_state_sha256", "seed.torch_initial"), SEMANTIC, drawn(6), drawn(60)),
    Plant("stream consumed", ("rng.torch_cpu_state_sha256", "seed.torch_initial"), SEMANTIC, drawn(7), consumed),
    Plant("length", ("generation.max_new_tokens",), SEMANTIC, plain, greedy(max_new_tokens=9)),
    Plant("stop strings", ("generation.stop_strings",), SEMANTIC, plain,
          lambda b, p: b.ask(p, stop_strings=[" "], tokenizer=b.tokenizer)),
    Plant("end token", ("generation.eos_token_id",), SEMANTIC, plain, greedy(eos_token_id=list(range(200, 700)))),
    Plant("forced beginning", ("generation.begin_suppress_tokens",), SEMANTIC, plain,
          greedy(begin_suppress_tokens=list(range(200, 1200)))),
    # before the model
    Plant("normaliser", ("tokenizer.sha256",), SEMANTIC, plain, tokenizer(lower)),
    Plant("token in front", ("tokenizer.add_bos", "tokenizer.sha256", "tokenizer.special_ids"), SEMANTIC, plain,
          tokenizer(begins)),
    Plant("a blank at the end", ("input.token_ids",), SEMANTIC, plain, lambda b, p: b.ask(p + " ")),
    Plant("cut off", ("input.token_ids", "input.truncated"), SEMANTIC, plain,
          lambda b, p: b.ask(b.tokenizer.decode(b.tokenizer(p)["input_ids"][1:]))),
)  # fmt: skip
