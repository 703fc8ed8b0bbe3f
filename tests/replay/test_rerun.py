"""A recorded call made again is the call that it was: ids, mask, settings and draws; and what is not so is said.

Real models of transformers, saved and loaded, on the CPU.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

import provenance
from provenance.errors import BadFile, UsageError
from provenance.explain import compare
from provenance.facts import Run
from provenance.replay import load, rerun
from provenance.replay.rerun import Rerun
from provenance.replay.verdict import Policy, judge, named
from tests.fakes import models

LEFT = ([0, 0, 5, 6, 7], [8, 9, 10, 11, 12], [0, 13, 14, 15, 16])
RIGHT = ([5, 6, 7, 0, 0], [8, 9, 10, 11, 12])
HOLES = ([5, 0, 6, 7, 0], [8, 9, 10, 11, 12])
Call = Callable[[Any], object]


def save(folder: Path, model: Any = None) -> Path:
    """Save a model with its tokenizer as a checkpoint."""
    (models.llama() if model is None else model).save_pretrained(folder)
    models.letters().save_pretrained(folder)
    return folder


def record(folder: Path, db: Path, call: Call, change: Call = lambda model: model, **options: Any) -> Run:
    """Load a checkpoint, record one call of it, and read the run back."""
    kind = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    model = kind.from_pretrained(folder, **options)
    model = change(model) or model
    provenance.init(db=db, writer="off")
    provenance.wrap(model, models.letters())
    call(model)
    run = models.last(db)
    provenance.uninstrument(model)
    return run


def again(run: Run, source: Any = None, allow: tuple[str, ...] = (), **options: Any) -> Rerun:
    """Make a run again and fetch its replay."""
    made = rerun.rerun(run, load.Once(run, source), named(allow, [run]), **options)
    rerun.fetch([made])
    return made


def held(made: Rerun) -> Run:
    """Check that a replay gave what its original gave, and return it."""
    assert (made.refused, made.error) == ([], "")
    assert made.run is not None
    verdicts = {pair["verdict"] for pair in compare.compare(made.original, made.run)["pairs"]}
    assert verdicts == {"same"}
    assert [s.output_ids for s in made.run.sequences] == [s.output_ids for s in made.original.sequences]
    assert [s.steps for s in made.run.sequences] == [s.steps for s in made.original.sequences]
    return made.run


def padded(model: Any, rows: tuple[list[int], ...], given: bool = True, **settings: Any) -> object:
    ids = torch.tensor(rows)
    mask = {"attention_mask": (ids != 0).long()} if given else {}
    return model.generate(ids, **mask, **{"max_new_tokens": 9, **settings})


CALLS: dict[str, Call] = {
    "greedy": lambda m: m.generate(models.tensor(), max_new_tokens=12, do_sample=False),
    "sampled": lambda m: m.generate(models.tensor(), max_new_tokens=12, do_sample=True, temperature=1.7, top_k=0),
    "returns": lambda m: padded(m, LEFT, do_sample=True, num_return_sequences=3),
    "left": lambda m: padded(m, LEFT, do_sample=False),
    "left sampled": lambda m: padded(m, LEFT, do_sample=True, top_p=0.9),
    "right": lambda m: padded(m, RIGHT, do_sample=False),
    "holes": lambda m: padded(m, HOLES, do_sample=False),
    "no mask given": lambda m: padded(m, LEFT, given=False, do_sample=False),
    "penalties": lambda m: padded(m, LEFT, repetition_penalty=1.4, no_repeat_ngram_size=2, do_sample=False),
    "beams": lambda m: padded(m, LEFT, num_beams=3, length_penalty=0.5, do_sample=False),
    "a configuration": lambda m: m.generate(
        models.tensor(), GenerationConfig(max_new_tokens=7, do_sample=True, min_p=0.01, pad_token_id=0, eos_token_id=2)
    ),
    "no prompt": lambda m: m.generate(max_new_tokens=5, do_sample=False),
    "stop strings": lambda m: m.generate(
        models.tensor(), max_new_tokens=30, stop_strings=["G", "x"], tokenizer=models.letters(), do_sample=False
    ),
    "a static cache": lambda m: m.generate(
        models.tensor(), max_new_tokens=6, cache_implementation="static", disable_compile=True, do_sample=False
    ),
    "biased": lambda m: m.generate(models.tensor(), max_new_tokens=6, sequence_bias={(9,): -5.0, (7, 8): 2.0}, do_sample=False),
    "minimum": lambda m: m.generate(models.tensor(), max_length=15, min_length=12, do_sample=False),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call_made_again_is_the_call_that_it_was(name: str, tmp_path: Path, db: Path) -> None:
    torch.manual_seed(11)
    torch.rand(7)  # the state is not that of the seed
    run = record(save(tmp_path / "ck"), db, CALLS[name])
    torch.manual_seed(99)
    before = torch.get_rng_state(), random.getstate()
    replay = held(again(run))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (replay.kind, replay.tags) == ("replay", {"replay_of": run.run_id})
    differing = {
        item for item in run.fields if item.startswith(("generation.", "batch.")) and run.fields[item] != replay.fields[item]
    }  # fmt: skip
    assert differing == set()
    assert replay.fields["weights.loaded_root"] == run.fields["weights.loaded_root"]
    if "sampled" in name or name in ("returns", "a configuration"):
        assert run.states.keys() == {"rng.torch_cpu"}
        assert replay.states == run.states


def test_an_encoder_and_decoder_is_replayed_too(tmp_path: Path, db: Path) -> None:
    folder = save(tmp_path / "ck", models.t5())
    held(again(record(folder, db, lambda m: padded(m, RIGHT, do_sample=False))))


def test_a_default_length_is_restored(tmp_path: Path, db: Path) -> None:
    def short(model: Any) -> None:
        with pytest.warns(UserWarning, match="max_length"):
            model.generate(models.tensor(), do_sample=False)

    run = record(save(tmp_path / "ck"), db, short)
    assert len(held(again(run)).sequences[0].output_ids or ()) == 20


def test_what_the_checkpoint_says_of_decoding_has_no_say(tmp_path: Path, db: Path) -> None:
    folder = save(tmp_path / "ck")
    run = record(folder, db, CALLS["greedy"], lambda m: setattr(m.generation_config, "repetition_penalty", 1.3))
    assert run.fields["generation.repetition_penalty"].source == "model"
    path = folder / "generation_config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"do_sample": True, "temperature": 0.1, "max_new_tokens": 3})
    )
    replay = held(again(run))
    assert replay.fields["generation.repetition_penalty"].value == 1.3


@pytest.mark.parametrize("whole", [False, True])
def test_the_type_is_restored_and_the_tables_with_it(tmp_path: Path, db: Path, whole: bool) -> None:
    change: Call = (lambda m: m.to(torch.bfloat16)) if whole else (lambda m: m)
    options = {} if whole else {"dtype": torch.bfloat16}
    run = record(save(tmp_path / "ck"), db, CALLS["left"], change, **options)
    assert run.fields["model.dtype"].value == "bfloat16"
    replay = held(again(run))
    for name in ("model.dtype", "model.buffer_dtypes", "weights.loaded_root"):
        assert replay.fields[name] == run.fields[name]


def test_attention_and_training_are_restored(tmp_path: Path, db: Path) -> None:
    folder = save(tmp_path / "ck", models.llama(attention_dropout=0.4))

    def call(model: Any) -> None:
        torch.manual_seed(4)
        model.train().generate(models.tensor(), max_new_tokens=9, do_sample=False)

    run = record(folder, db, call, attn_implementation="eager")
    replay = held(again(run))  # nothing had drawn since the seed, so the seed makes the state
    assert replay.fields["model.attn_implementation"].value == "eager"
    assert replay.fields["model.training"].value is True


def test_a_seed_that_does_not_make_the_state_is_not_taken_for_it(tmp_path: Path, db: Path) -> None:
    folder = save(tmp_path / "ck", models.llama(attention_dropout=0.4))

    def call(model: Any) -> None:
        torch.manual_seed(4)
        torch.rand(1)
        model.train().generate(models.tensor(), max_new_tokens=9, do_sample=False)

    made = again(record(folder, db, call))
    assert [item.field for item in made.refused] == ["rng.torch_cpu_state_sha256"]
    assert "seed 4 alone does not make it" in made.refused[0].because
    assert made.run is None


# -- other weights ----------------------------------------------------------------------------------


def one_ulp(folder: Path) -> None:
    """Move one weight by one unit in the last place."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][3, 5] = torch.nextafter(tensors[name][3, 5], torch.tensor(9.0))
    save_file(tensors, path, metadata={"format": "pt"})


def another(folder: Path) -> None:
    """Put another checkpoint into the place of the first."""
    save(folder, models.llama(seed=5))


@pytest.mark.parametrize("change", [one_ulp, another])
def test_other_weights_are_found_before_anything_runs(change: Callable[[Path], None], tmp_path: Path, db: Path) -> None:
    folder = save(tmp_path / "ck")
    run = record(folder, db, CALLS["left"])
    change(folder)
    made = again(run)
    assert made.other_weights
    assert made.run_id == ""
    assert "these are other weights" in made.refused[0].because
    result = judge(made, Policy())
    assert (result.verdict, result.code) == ("not_comparable", 1)
    assert "--allow weights runs it all the same" in result.why
    assert len(models.runs(db)) == 1  # no run was recorded for it

    allowed = again(run, allow=("weights",))
    assert allowed.run is not None
    assert allowed.run.fields["weights.loaded_root"] != run.fields["weights.loaded_root"]
    result = judge(allowed, Policy())
    if change is another:
        assert (result.verdict, result.code) == ("not_comparable", 1)
        assert result.answer is not None
        assert result.answer["causes"][0]["field"] == "weights.loaded_root"


def test_files_stand_for_weights_that_were_not_hashed_in_memory(tmp_path: Path, db: Path) -> None:
    folder = save(tmp_path / "ck")
    provenance.init(db=db, writer="off", weights="files")
    run = record_with_weights(folder, db, "files")
    assert not run.fields["weights.loaded_root"].known
    assert again(run).refused == []
    one_ulp(folder)
    assert [item.field for item in again(run).refused] == ["weights.files_root"]


def record_with_weights(folder: Path, db: Path, how: str) -> Run:
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    provenance.init(db=db, writer="off", weights=how)
    provenance.wrap(model, models.letters())
    CALLS["greedy"](model)
    return models.last(db)


def test_weights_that_nobody_hashed_are_said_to_be_unknown(tmp_path: Path, db: Path) -> None:
    run = record_with_weights(save(tmp_path / "ck"), db, "off")
    made = again(run)
    assert made.refused == []
    said = [item.because for item in made.lost if item.field == "weights.loaded_root"]
    assert said == ["whether these are the weights of the original is not known: hashing is off (weights=off)"]


# -- switches ---------------------------------------------------------------------------------------


def test_switches_are_restored_and_put_back(tmp_path: Path, db: Path) -> None:
    folder = save(tmp_path / "ck")
    stood = torch.get_num_threads(), torch.backends.mkldnn.deterministic, torch.are_deterministic_algorithms_enabled()

    def call(model: Any) -> None:
        torch.set_num_threads(3)
        torch.backends.mkldnn.deterministic = True
        torch.use_deterministic_algorithms(True, warn_only=True)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
            CALLS["left"](model)

    try:
        run = record(folder, db, call)
    finally:
        torch.set_num_threads(1)
        torch.backends.mkldnn.deterministic = False
        torch.use_deterministic_algorithms(False)
    try:
        replay = held(again(run))
        names = ("torch.num_threads", "torch.backends.mkldnn.deterministic", "torch.deterministic_algorithms",
                 "torch.deterministic_warn_only", "torch.autocast.cpu", "torch.inference_mode")  # fmt: skip
        assert [replay.fields[name].value for name in names] == [3, True, True, True, "torch.bfloat16", True]
        assert torch.get_num_threads() == 1
        assert not torch.are_deterministic_algorithms_enabled()
        assert not torch.is_autocast_enabled("cpu")
        own = again(run, own_switches=True).run
        assert own is not None
        assert [own.fields[name].value for name in names] == [1, False, False, False, "off", False]
        assert {
            item.name for item in own.fields.values() if item.name in names and item != run.fields[item.name]
        } == set(names)
    finally:
        torch.set_num_threads(stood[0])
        torch.backends.mkldnn.deterministic = stood[1]


# -- what cannot be restored ------------------------------------------------------------------------


class Shift(LogitsProcessor):  # type: ignore[misc]
    """A processor of the caller's own."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores.roll(1, dims=-1)


UNHAD: dict[str, tuple[str, str, Call]] = {
    "processors": ("generation.logits_processor", "the processors of the caller's own", lambda m: m.generate(
        models.tensor(), max_new_tokens=5, logits_processor=LogitsProcessorList([Shift()]))),
    "a function": ("generation.prefix_allowed_tokens_fn", "the function that allows tokens", lambda m: m.generate(
        models.tensor(), max_new_tokens=5, prefix_allowed_tokens_fn=lambda _, ids: [5, 6])),
    "a draft": ("generation.assistant_model", "the model that drafts", lambda m: m.generate(
        models.tensor(), max_new_tokens=5, assistant_model=models.llama())),
    "positions": ("batch.position_ids_sha256", "position_ids was given, and only its digest is kept", lambda m: m.generate(
        models.tensor(), max_new_tokens=5, position_ids=torch.tensor([[3, 4, 5, 6, 7]]))),
    "a cache": ("input.past_key_values_given", "a cache was handed in", lambda m: m.generate(
        models.tensor(), max_new_tokens=5, cache=transformers.DynamicCache())),
}  # fmt: skip


@pytest.mark.parametrize("name", UNHAD)
def test_what_cannot_be_restored_is_said_and_not_run_unless_allowed(name: str, tmp_path: Path, db: Path) -> None:
    field, said, call = UNHAD[name]
    run = record(save(tmp_path / "ck"), db, call)
    made = again(run)
    assert [(item.field, said in item.because) for item in made.refused] == [(field, True)]
    result = judge(made, Policy())
    assert (result.verdict, result.code) == ("inconclusive", 3)
    assert f"--allow {field} runs it" in result.why
    assert again(run, allow=(field,)).run is not None


def test_embeddings_have_no_ids_to_replay(tmp_path: Path, db: Path) -> None:
    run = record(
        save(tmp_path / "ck"), db, lambda m: m.generate(inputs_embeds=m.get_input_embeddings()(models.tensor()), max_new_tokens=4)
    )  # fmt: skip
    made = again(run, allow=("input.*",))
    assert [item.sentence for item in made.refused] == [
        "input.token_ids: the input was no token ids but inputs_embeds, of which only digests are kept"
    ]


@pytest.mark.parametrize("capture", ["digest", "off"])
def test_inputs_that_were_not_kept_are_said_before_a_model_is_loaded(capture: str, tmp_path: Path, db: Path) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(save(tmp_path / "ck"))
    provenance.init(db=db, writer="off", capture=capture)
    provenance.wrap(model)
    CALLS["sampled"](model)
    run = models.last(db)

    def never() -> Any:
        raise AssertionError

    made = rerun.rerun(run, never)
    assert [item.field for item in made.refused] == ["input.token_ids"]
    assert "recorded with capture=digest or off" in made.refused[0].because
    assert judge(made, Policy()).code == 3


def test_a_hook_of_the_original_is_missed(tmp_path: Path, db: Path) -> None:
    def steer(model: Any) -> None:
        model.model.layers[0].register_forward_hook(lambda _, __, out: out * 1.5)

    run = record(save(tmp_path / "ck"), db, CALLS["greedy"], steer)
    made = again(run)
    assert [item.sentence for item in made.refused] == ["model.forward_hooks: it was 1, and is 0 now"]
    assert judge(again(run, allow=("model.forward_hooks",)), Policy()).verdict != "same"


# -- models -----------------------------------------------------------------------------------------


def test_a_model_without_a_checkpoint_comes_from_a_function(tmp_path: Path, db: Path) -> None:
    model = models.llama()
    provenance.init(db=db, writer="off")
    provenance.wrap(model)
    CALLS["sampled"](model)
    run = models.last(db)
    with pytest.raises(UsageError, match=r"built in memory\. Name a checkpoint with --model PATH, or a function"):
        again(run)
    held(again(run, models.llama))
    held(again(run, "tests.fakes.models:llama"))
    held(again(run, str(save(tmp_path / "saved"))))
    assert again(run, lambda: models.llama(seed=5)).other_weights


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("tests.fakes.models:nothing", "--model tests.fakes.models:nothing gave no model: AttributeError"),
        ("no.such.module:f", "gave no model: ModuleNotFoundError"),
        ("tests.fakes.models:letters", "has no generate; return a model"),
        ("nowhere", "there is no checkpoint at nowhere"),
    ],
)
def test_a_model_that_cannot_be_had_is_one_sentence(source: str, said: str, tmp_path: Path, db: Path) -> None:
    run = record(save(tmp_path / "ck"), db, CALLS["greedy"])
    with pytest.raises((UsageError, BadFile), match=said.replace(".", r"\.")):
        again(run, source)


def test_a_checkpoint_that_is_gone_is_one_sentence(tmp_path: Path, db: Path) -> None:
    folder = save(tmp_path / "ck")
    run = record(folder, db, CALLS["greedy"])
    folder.rename(tmp_path / "moved")
    with pytest.raises(
        BadFile, match=r"there is no checkpoint at .*ck, where run .* had its model; name it with --model PATH"
    ):
        again(run)
    held(again(run, str(tmp_path / "moved")))


def test_only_files_of_tensors_are_read(tmp_path: Path, db: Path) -> None:
    folder = save(tmp_path / "ck")
    run = record(folder, db, CALLS["greedy"])
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadFile, match="Only safetensors that lie on this machine are read"):
        again(run)


def test_a_call_that_raises_now_has_failed(tmp_path: Path, db: Path) -> None:
    run = record(save(tmp_path / "ck"), db, CALLS["greedy"])

    def smaller() -> Any:
        return models.llama(vocab_size=6)

    made = again(run, smaller, ("weights", "model.*"))
    assert made.error.startswith("IndexError")
    result = judge(made, Policy())
    assert (result.verdict, result.code) == ("failed", 1)
    assert models.last(db).status == "error"


def test_nothing_is_replayed_where_nothing_is_recorded(tmp_path: Path, db: Path) -> None:
    run = record(save(tmp_path / "ck"), db, CALLS["greedy"])
    provenance.init(db=db, disabled=True)
    with pytest.raises(UsageError, match="nothing can be recorded here: disabled"):
        again(run)
