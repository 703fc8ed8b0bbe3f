"""Which differences cannot have done it, and the sentence that says why. Only what is certain stands here.

Each rule is a small function from a difference and the pair it stands in to a sentence, or to nothing. What the
catalogue's data says (effect, condition) comes first; what data cannot say follows, each with its reason beside
it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from provenance.catalogue.fields import Spec, spec
from provenance.explain import calls, conditions
from provenance.explain.fields import Difference
from provenance.explain.tokens import Evidence
from provenance.facts import Run, Sequence, State

LENGTHS = {"generation.max_new_tokens", "generation.max_length", "generation.max_time", "generation.stop_strings",
           "generation.stopping_criteria", "generation.stopping_criteria_values",
           "generation.stopping_criteria_code"}  # fmt: skip
IDENTITY = {"model.name_or_path", "model.revision", "weights.files_root", "weights.path", "weights.format",
            "weights.missing_keys", "weights.tied_keys"}  # fmt: skip
FILES, IN_FILES, SAME_TENSORS = "weights.files_root", "weights.tensors_root", "other files, the same tensors"
NARROWED = ("weights.bfloat16_root", "weights.float16_root")
UNLOADED = "torch is not loaded"
QUANTIZED = "model.quantization_config.quant_method"
# What makes other tensors of the same files. That it was all that happened to them, only the files can say.
MADE = {
    "model.dtype": "cast to another type", "adapters.merged": "merged with an adapter",
    "model.rope_parameters": "computed from other rotary settings", "model.tied_weights": "tied otherwise",
    "weights.tied_keys": "tied otherwise",
    "weights.missing_keys": "filled in where the checkpoint had none",
    QUANTIZED: "quantized",
}  # fmt: skip
# Values of the configuration that are fields of their own: its digest says nothing that they do not say.
CONFIG, REST = "model.config_digest", "model.config_rest_digest"
COMPUTED = {"model.norm_eps", "model.rope_theta", "model.attention_scaling", "model.logit_scaling", "model.activation"}
CONFIGURED = COMPUTED | {
    "model.rope_parameters", "model.sliding_window", "model.max_position_embeddings", "model.tied_weights",
    "model.is_encoder_decoder", "model.dropout_probs", "model.quantization_config.quant_method",
    "model.quantization_config.bits",
}  # fmt: skip
SIDES = ("batch.padding_side", "tokenizer.padding_side")
# Digests over many fields: they would differ with fields that cannot matter.
PARENTS = {"lib.all_digest", "container.image_digest"}
# What chooses the way of decoding.
WAYS = ("generation.do_sample", "generation.num_beams", "generation.assistant_model", "generation.custom_generate",
        "generation.penalty_alpha", "generation.dola_layers", "generation.prompt_lookup_num_tokens")  # fmt: skip
PROCESSORS = {"generation.logits_processors", "generation.logits_processor", "generation.logits_processor_values",
              "generation.logits_processor_code"}  # fmt: skip
TENSORS = {"weights.loaded_root"}
# They fetch or read weights; where the tensors are equal they did it alike.
LOADERS = {"lib.safetensors.version", "lib.huggingface-hub.version", "env.HF_HUB_OFFLINE", "env.TRANSFORMERS_OFFLINE",
           "env.HF_HOME", "env.HF_HUB_CACHE", "vllm.load_config.load_format", "sglang.load_format"}  # fmt: skip
# They act before the ids and after them.
BEFORE = {"lib.tokenizers.version", "lib.sentencepiece.version", "lib.tiktoken.version", "lib.mistral-common.version",
          "lib.jinja2.version", "lib.numpy.version", "python.utf8_mode", "env.PYTHONHASHSEED",
          "python.hash_randomization"}  # fmt: skip
# A variable, and the field that holds what it comes to. (NVIDIA_TF32_OVERRIDE acts inside cuBLAS, past every getter.)
SETS = {"env.OMP_NUM_THREADS": "torch.num_threads", "env.MKL_NUM_THREADS": "mkl.num_threads",
        "env.ATEN_CPU_CAPABILITY": "cpu.capability", "cpu.affinity": "torch.num_threads",
        "cpu.count_logical": "torch.num_threads", "cpu.count_physical": "torch.num_threads",
        "cpu.threads_per_core": "torch.num_threads"}  # fmt: skip
# Versions of transformers for which greedy search was seen to ignore the sampling settings (tests/explain/test_rules.py
# runs it on the installed one).
GREEDY_IGNORES_FROM = (4, 39)


PLACES = ("rng.device_of_sampling", "rng.batch_shape_at_sampling", "rng.row_at_sampling")
# Rows share one stream: in another batch each draws other numbers of it.
DRAWN = ("seed.given", "seed.torch_initial", "rng.consumed", "rng.batch_shape_at_sampling", "rng.row_at_sampling")
STREAMS = ("rng.torch_cpu_state_sha256", "rng.torch_cuda_state_sha256", "rng.torch_mps_state_sha256",
           "rng.torch_xpu_state_sha256")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pair:
    """Two sequences of two runs, and what their tokens show."""

    a: Run
    b: Run
    one: Sequence
    other: Sequence
    inputs_equal: bool | None
    evidence: Evidence
    sampled: bool
    differing: frozenset[str] = frozenset()

    @property
    def function(self) -> bool:
        """Say whether recorded functions were called, and no model."""
        return calls.is_function(self.a, self.b)

    @property
    def bare(self) -> bool:
        """Say whether recorded functions were called in processes that never loaded torch: its world took no part."""
        versions = [run.fields.get("torch.version") for run in (self.a, self.b)]
        return self.function and all(item is not None and item.reason.endswith(UNLOADED) for item in versions)

    @property
    def endings(self) -> calls.Endings:
        """Say how the two calls ended."""
        return calls.Endings(calls.ended(self.a, self.one), calls.ended(self.b, self.other))

    @property
    def again(self) -> str:
        """Say how the call of A is made again."""
        return "make A's call again" if self.function else "run A's prompt again"

    @property
    def same_noise(self) -> bool:
        """Say whether both runs are known to have drawn from one random stream, at one place."""
        states = [name for name in STREAMS if _both(self, name)]
        return bool(states) and not self.differing & {*STREAMS, *DRAWN}

    @property
    def noisy(self) -> bool:
        """Say whether both runs drew numbers although no token was drawn: dropout does."""
        return not self.sampled and all(
            conditions.value(run.fields, "rng.consumed") is True for run in (self.a, self.b)
        )

    @property
    def repeats(self) -> bool:
        """Say whether equal runs are known to give equal logits, to the last bit: CPUs do, other devices if told to."""
        runs = [run.fields for run in (self.a, self.b)]
        if all(conditions.value(fields, "device.in_use") == ["cpu"] for fields in runs):
            return True
        return all(conditions.value(fields, "torch.deterministic_algorithms") is True for fields in runs)

    @property
    def beneath(self) -> bool | None:
        """Say whether the parameters are equal but for what a cast does to them; None where no digest tells."""
        if _agree(self, "weights.parameters_root"):
            return True
        both = [name for name in NARROWED if _both(self, name)]
        if both and all(_agree(self, name) for name in both):
            return True
        # Merged, untied or quantised, the parameters had to change.
        return None if not both or self.differing & (MADE.keys() - {"model.dtype"}) else False

    @property
    def weights_equal(self) -> bool | None:
        """Say whether both runs had the same tensors in memory; None where that is not known."""
        a, b = (run.fields.get("weights.loaded_root") for run in (self.a, self.b))
        if a is None or b is None or not (a.known and b.known):
            return None
        return a == b


def past_padding(difference: Difference, pair: Pair) -> bool:
    """Say whether a decoder may have gone on writing after padding on the right: then it computed something else.

    Padding on the left is masked, and positions count from the prompt: there it is a matter of shapes alone.
    """
    if difference.name not in SIDES or all(conditions.truth("encdec", run) is True for run in (pair.a, pair.b)):
        return False
    if difference.name != SIDES[0] and SIDES[0] not in pair.differing and SIDES[0] in pair.a.fields:
        return False  # what the batch really had is known, and this row had the same
    known = [side.value for side in (difference.a, difference.b) if side is not None and side.state is State.VALUE]
    # Of a batch that was padded on both sides it is not told how this row was: then the tokens say it.
    return "right" in known or ("left+right" in known and pair.evidence.kind not in ("zero", "rounding"))


def _both(pair: Pair, name: str) -> bool:
    """Say whether both runs know a value of a field."""
    return all(conditions.value(run.fields, name) is not None for run in (pair.a, pair.b))


def _agree(pair: Pair, name: str) -> bool:
    """Say whether both runs know a field, and it is the same."""
    one, other = pair.a.fields.get(name), pair.b.fields.get(name)
    return one is not None and other is not None and one == other


Rule = Callable[[Difference, Spec, Pair], str]


def dismissal(difference: Difference, pair: Pair) -> str:
    """Return why a difference cannot be the cause, or an empty text where it can."""
    declared = spec(difference.name)
    for rule in RULES:
        sentence = rule(difference, declared, pair)
        if sentence:
            return sentence
    return ""


def _context(_: Difference, declared: Spec, __: Pair) -> str:
    return "it is context and never acts on an output" if declared.effect == "none" else ""


def _greedy(difference: Difference, declared: Spec, pair: Pair) -> str:
    """Say it with the version, because it is the version's doing."""
    words = declared.active_when.replace("&", "|").split("|")
    if declared.group != "generation" or "sample" not in words or pair.sampled:
        return ""
    if not conditions.moot(declared.active_when, pair.a, pair.b):
        return ""
    found = conditions.value(pair.a.fields, "lib.transformers.version")
    version = str(found or "")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < GREEDY_IGNORES_FROM:
        return ""
    short = difference.name.partition(".")[2]
    return f"greedy decoding reads no {short} in transformers {version.rpartition('.')[0] or version}"


def _one_samples(difference: Difference, declared: Spec, pair: Pair) -> str:
    """Where only one run draws, what shapes the drawing has nothing to be compared with."""
    if declared.active_when == "sample" and "generation.do_sample" in pair.differing:
        return "only one of the two runs draws its tokens, and that is listed by itself"
    if difference.name == "generation.top_k" and "generation.do_sample" in pair.differing:
        return "only one of the two runs draws its tokens, and that is listed by itself"
    return ""


def _moot(_: Difference, declared: Spec, pair: Pair) -> str:
    if pair.noisy and declared.name.startswith(("rng.", "seed.")) and declared.name not in PLACES:
        return ""  # the condition asks for drawn tokens; dropout reads the same stream
    if declared.group == "generation" and "sample" in declared.active_when:
        return ""  # the version decides, above
    if conditions.moot(declared.active_when, pair.a, pair.b):
        return conditions.why_moot(declared.active_when, pair.a, pair.b)
    return ""


def _same_tensors(difference: Difference, _: Spec, pair: Pair) -> str:
    name = difference.name
    if pair.weights_equal and (name in IDENTITY or name in LOADERS or name.startswith("files.model")):
        return "the tensors in memory are equal, whatever they were called and wherever they came from"
    return SAME_TENSORS if name == FILES and _agree(pair, IN_FILES) else ""


def _cast(difference: Difference, _: Spec, pair: Pair) -> str:
    """Another type changes every tensor: the type is the cause, and the digest follows."""
    if difference.name not in TENSORS:
        return ""
    how = next((how for name, how in MADE.items() if name in pair.differing), None)
    if how is None or pair.beneath is False:
        return ""
    if pair.beneath:
        return f"the tensors were {how}, and that is listed by itself; beneath it they are equal"
    if pair.evidence.kind == "large" and "model.dtype" in pair.differing:
        return ""  # further than a cast moves logits: what lies beneath it may be another model
    if _agree(pair, FILES):
        return f"the tensors were {how}, and that is listed by itself; the files that they were loaded from are equal"
    return ""


def _same_ids(difference: Difference, declared: Spec, pair: Pair) -> str:
    """Dismiss what makes token ids, and what turns ids into text, where the ids that went in are equal."""
    if pair.function or not pair.inputs_equal or pair.evidence.ids_equal is not False:
        return ""
    name = difference.name
    if name == "tokenizer.padding_side" or name.startswith("input.past"):
        return ""
    makes_ids = declared.group == "tokenizer" and not name.startswith("processor.")
    if makes_ids or name.startswith(("chat_template.", "files.tokenizer", "files.chat", "files.vocab", "files.merges")):
        return "both runs fed the same token ids to the model"
    if declared.group == "input" and "ids" in name:
        return "both runs fed the same token ids to the model"
    if name in BEFORE:
        return "it prepares inputs and reads outputs; the token ids that reached the model are equal"
    return ""


def _sets(difference: Difference, _: Spec, pair: Pair) -> str:
    """Dismiss a variable that sets a field where the value in force is known, and equal."""
    target = SETS.get(difference.name)
    if target is not None and _agree(pair, target):
        return f"it sets {target}, which is equal in both"
    if difference.name in ("env.LD_LIBRARY_PATH", "env.LD_PRELOAD") and _agree(pair, "loaded.libc"):
        both = [name for name in pair.a.fields if name.startswith("loaded.") and name in pair.b.fields]
        if not any(name.startswith("loaded.") and not name.endswith(".path") for name in pair.differing):
            return f"the {len(both)} libraries that were really loaded are equal"
    return ""


def _length(difference: Difference, _: Spec, pair: Pair) -> str:
    if difference.name in LENGTHS and pair.evidence.divergent_at is not None and not pair.evidence.prefix:
        return "it can only end an output, and these part before either ended"
    return ""


def _no_draw(difference: Difference, declared: Spec, pair: Pair) -> str:
    drew = [conditions.value(run.fields, "rng.consumed") for run in (pair.a, pair.b)]
    if difference.name.startswith(("rng.", "seed.")) and not pair.sampled and drew == [False, False]:
        return "neither run drew a random number"
    del declared
    return ""


def _no_dropout(difference: Difference, _: Spec, pair: Pair) -> str:
    """Dismiss training mode where nothing in the model acts in it: no dropout is on, and no layer keeps statistics."""
    if difference.name != "model.training":
        return ""
    for run in (pair.a, pair.b):
        kinds = conditions.value(run.fields, "model.module_kinds")
        if not isinstance(kinds, list) or "norm of batches" in kinds:
            return ""
        if conditions.value(run.fields, "model.training") is not False:
            on = conditions.value(run.fields, "model.dropout_active")
            if on != []:
                return ""
    return "no dropout is on in the model and no layer keeps statistics, so training mode changes nothing"


def _one_drew(difference: Difference, declared: Spec, pair: Pair) -> str:
    """Where one run drew its tokens and the other did not, that is the difference, and not where its stream stood."""
    if declared.effect == "random" and "generation.do_sample" in pair.differing:
        return "only one of the two runs drew its tokens"
    del difference
    return ""


def _parents(difference: Difference, _: Spec, pair: Pair) -> str:
    """Dismiss digests over many fields: they say nothing that their members do not say."""
    if difference.name in PARENTS:
        return "every package that can matter is compared by its own version"
    if difference.name == "weights.tied_keys" and QUANTIZED in pair.differing:
        return "quantised layers keep their weights elsewhere, and that is listed by itself"
    if difference.name == "generation.mode":
        way = next((name for name in WAYS if name in pair.differing), None)
        return f"it follows from {way}" if way is not None else ""
    if difference.name in ("generation.defaults_digest", "files.generation_config.json") and _agree(
        pair, "generation.do_sample"
    ):
        return "the settings that it led to are compared one by one"
    if difference.name == "generation.logits_processors" and any(
        name.startswith("generation.") and name not in (*PROCESSORS, *LENGTHS) for name in pair.differing
    ):
        return "the list follows from the settings, which are compared one by one"
    return ""


def _configuration(difference: Difference, _: Spec, pair: Pair) -> str:
    """Dismiss digests of the configuration whose every value that acts is compared by itself."""
    name = difference.name
    if name in COMPUTED and name not in pair.differing and _both(pair, CONFIG):
        return f"{CONFIG} covers it, and is compared"
    if name == "files.config.json" and _agree(pair, CONFIG):
        return "the configuration that it led to is equal"
    if name == "files.config.json" and CONFIG in pair.differing:
        return "the configuration that it led to is compared by itself"
    if name == CONFIG and pair.differing & CONFIGURED and REST not in pair.differing:
        return "the values in it that differ are listed by themselves"
    if name == CONFIG and not pair.differing & CONFIGURED and _agree(pair, REST):
        return "it differs only in what never acts on an output, or is recorded by itself"
    return ""


RULES: tuple[Rule, ...] = (
    _context, _greedy, _one_samples, _moot, _same_tensors, _cast, _same_ids, _sets, _length, _no_draw,
    _no_dropout, _one_drew, _parents, _configuration,
)  # fmt: skip
