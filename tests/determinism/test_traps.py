"""Traps: each is shown on the installed transformers (the outputs differ), or shown to be harmless there."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import WatermarkingConfig

import provenance
from provenance.determinism import traps
from provenance.errors import BadFile
from provenance.facts import Field
from tests.conftest import Command
from tests.fakes import models

NEW = 12


def facts(runtime: str = "transformers", bare: bool | None = None, by: str = "call", **values: Any) -> traps.Facts:
    """Facts with generation settings by their plain name, and others with dots written as two underscores."""
    table = {}
    for name, value in values.items():
        full = name.replace("__", ".") if "__" in name else f"generation.{name}"
        table[full] = Field(full, value, source=by)
    return traps.Facts(table, runtime, bare)


def found(*arguments: Any, **values: Any) -> list[tuple[str, str]]:
    return [(item.rule.name, item.hit.field) for item in traps.lint(facts(*arguments, **values))]


def greedy(model: Any = None, **settings: Any) -> tuple[list[int], list[Any], bytes]:
    """Tokens, scores, and the random state after them."""
    with provenance.seeded(3):
        made = (model or models.llama()).generate(
            models.tensor(), do_sample=False, max_new_tokens=NEW, eos_token_id=None, output_scores=True,
            return_dict_in_generate=True, **settings,
        )  # fmt: skip
        state = torch.get_rng_state().numpy().tobytes()
    return made.sequences[0].tolist(), [step.tolist() for step in made.scores], state


HARMLESS: dict[str, Any] = {"temperature": 0.3, "top_k": 2, "top_p": 0.1, "min_p": 0.5, "top_h": 0.3, "typical_p": 0.2,
            "epsilon_cutoff": 0.3, "eta_cutoff": 0.3}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), HARMLESS.items())
def test_a_sampling_setting_is_harmless_in_greedy_decoding(name: str, value: float) -> None:
    """Tokens, scores and random state are equal to the last bit."""
    assert greedy(**{name: value}) == greedy()
    one: dict[str, Any] = {name: value}
    assert found(do_sample=False, **one) == [("sampling settings under greedy", f"generation.{name}")]
    assert traps.lint(facts(**one))[0].rule.kind == traps.HARMLESS
    drawn: dict[str, Any] = {"top_k": 7, name: value}
    assert found(do_sample=True, **drawn) == []


def test_the_table_of_harmless_settings_is_all_of_them() -> None:
    assert set(HARMLESS) == set(traps.DRAWN)


FIRST = greedy()[0][5]
ACTING: dict[str, Any] = {
    "repetition_penalty": 1.7, "no_repeat_ngram_size": 1, "bad_words_ids": [[FIRST]], "sequence_bias": {(FIRST,): -9.0},
    "suppress_tokens": [FIRST], "begin_suppress_tokens": [FIRST], "forced_eos_token_id": 2, "guidance_scale": 3.0,
    "watermarking_config": WatermarkingConfig(bias=8.0, greenlist_ratio=0.25),
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), ACTING.items())
def test_a_setting_that_changes_scores_acts_in_greedy_decoding(name: str, value: Any) -> None:
    assert greedy(**{name: value})[0] != greedy()[0]
    shown = value if isinstance(value, (int, float, list, dict)) else {"bias": 8.0}
    assert found(do_sample=False, **{name: shown}) == [("acts in greedy", f"generation.{name}")]
    neutral = traps.ACTING[name]
    for quiet in neutral:
        assert found(do_sample=False, **{name: quiet}) == []


def ended(**settings: Any) -> list[int]:
    """Decode where the third token of the plain output is the end token."""
    end = greedy()[0][7]
    out = models.llama().generate(models.tensor(), do_sample=False, max_new_tokens=NEW, eos_token_id=end, **settings)
    row: list[int] = out[0].tolist()
    return row


@pytest.mark.parametrize(
    ("name", "value"), [("min_new_tokens", 9), ("min_length", 12), ("exponential_decay_length_penalty", (0, 90.0))]
)
def test_a_setting_that_moves_the_end_acts_in_greedy_decoding(name: str, value: Any) -> None:
    assert ended(**{name: value}) != ended()
    assert found(**{name: value}) == [("acts in greedy", f"generation.{name}")]


@pytest.mark.parametrize(("name", "value"), [("encoder_repetition_penalty", 3.0), ("encoder_no_repeat_ngram_size", 1)])
def test_a_setting_of_the_encoder_acts_in_greedy_decoding(name: str, value: Any) -> None:
    model = models.t5()

    def scores(**more: Any) -> list[Any]:
        made = model.generate(models.tensor(), do_sample=False, max_new_tokens=4, output_scores=True,
                              return_dict_in_generate=True, **more)  # fmt: skip
        return [step.tolist() for step in made.scores]

    assert scores(**{name: value}) != scores()
    assert found(**{name: value}) == [("acts in greedy", f"generation.{name}")]


def test_penalty_alpha_makes_top_k_choose_another_decoding_loop() -> None:
    with pytest.raises((ValueError, OSError, RuntimeError)):  # contrastive search: its code is not part of the library
        greedy(penalty_alpha=0.6, top_k=4, custom_generate=None)
    assert found(penalty_alpha=0.6, top_k=4) == [("acts in greedy", "generation.penalty_alpha")]


def test_a_forced_first_token_acts_in_greedy_decoding() -> None:
    model = models.t5()
    forced = model.generate(models.tensor(), do_sample=False, max_new_tokens=6, forced_bos_token_id=9).tolist()
    assert forced != model.generate(models.tensor(), do_sample=False, max_new_tokens=6).tolist()
    assert forced[0][1] == 9
    assert found(forced_bos_token_id=9) == [("acts in greedy", "generation.forced_bos_token_id")]


@pytest.mark.parametrize(("name", "value"), [("dola_layers", "low"), ("token_healing", True)])
def test_a_setting_that_takes_another_way_of_decoding_is_named(name: str, value: Any) -> None:
    """Neither decodes as before: one wants code of somebody else's, the other a tokenizer."""
    with pytest.raises((ValueError, OSError, RuntimeError)):
        greedy(**{name: value})
    assert found(**{name: value}) == [("acts in greedy", f"generation.{name}")]


def test_max_time_cuts_by_the_clock() -> None:
    assert len(greedy(max_time=0.0)[0]) < len(greedy()[0])
    assert found(max_time=0.5) == [("stops by the clock", "generation.max_time")]
    assert found(max_time=float("inf")) == []


def test_a_checkpoint_supplies_values_that_nobody_wrote_down() -> None:
    model = models.llama()
    model.generation_config.do_sample = True
    model.generation_config.temperature = 5.0

    def ask(**settings: Any) -> list[int]:
        with provenance.seeded(3):
            row: list[int] = model.generate(models.tensor(), max_new_tokens=NEW, eos_token_id=None, **settings)[
                0
            ].tolist()
            return row

    assert ask() != ask(do_sample=False)
    assert ask() != ask(temperature=1.0)
    assert found(by="model", do_sample=True, temperature=5.0, top_k=0) == [
        ("supplied by the checkpoint", "generation.do_sample"),
        ("supplied by the checkpoint", "generation.temperature"),
    ]
    assert found(do_sample=True, temperature=5.0, top_k=0) == []


def test_the_library_cuts_to_fifty_tokens_where_nobody_set_top_k() -> None:
    def ask(**settings: Any) -> list[list[int]]:
        with provenance.seeded(3):
            rows: list[list[int]] = models.llama().generate(
                models.tensor(), do_sample=True, temperature=4.0, max_new_tokens=40, eos_token_id=None, **settings
            ).tolist()  # fmt: skip
            return rows

    assert ask() != ask(top_k=0)
    assert ask() == ask(top_k=50)
    assert found(do_sample=True) == [("top_k that nobody set", "generation.top_k")]
    assert found(by="library", do_sample=True, top_k=50) == [("top_k that nobody set", "generation.top_k")]
    assert found(do_sample=True, top_k=50) == []


def test_drawing_at_temperature_zero_raises() -> None:
    with pytest.raises(ValueError, match="strictly positive"):
        models.llama().generate(models.tensor(), do_sample=True, temperature=0.0, max_new_tokens=2)
    assert found(do_sample=True, temperature=0.0, top_k=0) == [("drawing at temperature 0", "generation.temperature")]


def test_padding_on_the_right_lets_a_decoder_go_on_from_a_pad_token() -> None:
    model = models.llama()

    def ask(row: list[int], mask: list[int]) -> list[int]:
        out = model.generate(models.tensor(row, [5, 6, 7, 8, 9]), attention_mask=models.tensor(mask, [1] * 5),
                             do_sample=False, max_new_tokens=NEW, eos_token_id=None)  # fmt: skip
        new: list[int] = out[0, 5:].tolist()
        return new

    left = ask([0, 0, 7, 8, 9], [0, 0, 1, 1, 1])
    assert (
        left
        == model.generate(models.tensor([7, 8, 9]), do_sample=False, max_new_tokens=NEW, eos_token_id=None)[
            0, 3:
        ].tolist()
    )
    assert ask([7, 8, 9, 0, 0], [1, 1, 1, 0, 0]) != left
    rule = "padding on the right"
    assert found(batch__size=2, batch__padding_side="right") == [(rule, "batch.padding_side")]
    assert found(batch__size=2, batch__padding_side="left", tokenizer__padding_side="right") == []
    assert found(tokenizer__padding_side="right") == [(rule, "tokenizer.padding_side")]
    assert found(tokenizer__padding_side="right", model__is_encoder_decoder=True) == []


def test_a_mask_that_is_missing_is_guessed_only_where_the_pad_token_is_no_end_token(db: Path) -> None:
    model = models.llama()
    ids = models.tensor([0, 0, 7, 8, 9], [5, 6, 7, 8, 9])
    mask = (ids != 0).long()

    def ask(eos: int, **more: Any) -> list[list[int]]:
        rows: list[list[int]] = model.generate(
            ids, do_sample=False, max_new_tokens=NEW, eos_token_id=eos, **more
        ).tolist()
        return rows

    assert ask(0, attention_mask=mask) != ask(0)  # pad is the end token: none is guessed
    assert ask(2, attention_mask=mask) == ask(2)  # guessed from the pad token
    provenance.init(db=db, writer="off")
    provenance.wrap(model)
    for eos, more in ((0, {}), (2, {}), (0, {"attention_mask": mask})):
        ask(eos, **more)
    rules = [[item.rule.name for item in traps.lint(traps.of_run(run))] for run in models.runs(db)]
    assert rules == [["batch without a mask"], [], []]


def test_a_batch_whose_ids_were_not_kept_may_hold_pad_tokens() -> None:
    asked: dict[str, Any] = {"batch__mask_given": False, "batch__mask_origin": "all ones", "batch__size": 2}
    (item,) = traps.lint(facts(**asked))
    assert "if there are any" in item.hit.because
    assert found("transformers", False, **asked) == []
    assert found(**{**asked, "batch__size": 1}) == []


def test_a_template_can_put_the_date_into_the_prompt() -> None:
    tokenizer = models.letters()
    message = [{"role": "user", "content": "hi"}]
    tokenizer.chat_template = "{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }} {{ messages[0]['content'] }}"
    texts = {tokenizer.apply_chat_template(message, tokenize=False) for _ in range(3)}
    assert len(texts) > 1
    assert found(chat_template__uses_date=True) == [("date in the template", "chat_template.uses_date")]
    assert found(chat_template__uses_date=False) == []


def test_mixed_acceptance_of_drafts_is_not_the_large_models_output() -> None:
    """With a weight the accepted tokens come from both models; drawing is where the mixture is used."""
    large, small = models.llama(22), models.llama(5)

    def ask(**settings: Any) -> list[list[int]]:
        rows = []
        for seed in range(4):
            with provenance.seeded(seed):
                out = large.generate(models.tensor(), assistant_model=small, do_sample=True, max_new_tokens=NEW,
                                     eos_token_id=None, **settings)  # fmt: skip
                rows.append(out[0].tolist())
        return rows

    assert ask(assistant_ensemble_weight=0.1) != ask()
    assert found(do_sample=True, top_k=0, assistant_ensemble_weight=0.5) == [
        ("lossy speculation", "generation.assistant_ensemble_weight")
    ]


def test_a_static_cache_remembers_an_earlier_longer_call(db: Path) -> None:
    """The second model has made one longer call before: its cache is longer, and its scores move."""
    fresh, used = models.llama(), models.llama()
    static = {"cache_implementation": "static", "disable_compile": True}
    used.generate(
        models.tensor(list(range(4, 60)) * 4), do_sample=False, max_new_tokens=150, eos_token_id=None, **static
    )
    plain, moved = greedy(fresh, **static), greedy(used, **static)
    assert used._previous_max_cache_length > fresh._previous_max_cache_length
    assert moved[1] != plain[1]
    del used._previous_max_cache_length
    assert greedy(used, **static)[1] == plain[1]
    known = {"batch__max_length": 5, "max_new_tokens": 12, "cache_implementation": "static"}
    rule = ("cache sized by an earlier call", "model.previous_max_cache_length")
    assert found(model__previous_max_cache_length=374, **known) == [rule]
    assert found(model__previous_max_cache_length=17, **known) == []


def test_seeds_that_engines_and_services_do_not_take_as_meant() -> None:
    assert found("llama_cpp", seed__llama_cpp=0) == [("seed 0", "seed.llama_cpp")]
    assert found("llama_cpp", seed__llama_cpp=1) == []
    assert found("vllm", vllm__sampling__temperature=0.7) == [("sampling without a seed", "vllm.sampling.seed")]
    assert found("vllm", vllm__sampling__temperature=0.0) == []
    assert found("vllm", vllm__sampling__temperature=0.7, vllm__sampling__seed=1) == []
    assert found("openai", service__request__seed=1) == [("a seed that may be ignored", "service.request.seed")]
    assert found("transformers", service__request__seed=1) == []
    name = "sglang.speculative_accept_threshold_single"
    assert found("sglang", **{name.replace(".", "__"): 0.9}) == [("lossy speculation", name)]


def test_another_version_than_the_one_shown_is_said() -> None:
    def note(version: str) -> str:
        return traps.lint(facts(repetition_penalty=1.2, lib__transformers__version=version))[0].note

    assert note("5.24.1") == ""
    assert note("4.57.0") == "shown on transformers 5.24; this is 4.57.0"
    assert note("4.30.2").endswith("which is older than the rule")


def test_every_rule_says_what_it_costs_where_it_holds_and_what_to_write() -> None:
    for rule in traps.RULES:
        assert rule.cost
        assert rule.shown
        assert rule.kind in (traps.TRAP, traps.HARMLESS)
    form = traps.lint(facts(max_time=1.0))[0].document()
    assert set(form) == {
        "rule",
        "kind",
        "field",
        "value",
        "set_by",
        "because",
        "write",
        "cost",
        "versions",
        "shown",
        "note",
    }


# -- the command ------------------------------------------------------------------------------------


def folder(tmp_path: Path, **files: Any) -> Path:
    place = tmp_path / "model"
    place.mkdir()
    for name, content in files.items():
        (place / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return place


def test_lint_reads_a_models_folder_as_data(command: Command, tmp_path: Path) -> None:
    place = folder(
        tmp_path, config={"is_encoder_decoder": False}, generation_config={"repetition_penalty": 1.1, "temperature": 0.6},
        tokenizer_config={"padding_side": "right", "chat_template": "{{ strftime_now('%d') }}"},
    )  # fmt: skip
    said = command("lint", "--model", str(place))
    assert said.returncode == 1, said.stderr
    assert "acts in greedy: generation.repetition_penalty = 1.1, set by model" in said.stdout
    assert "write  tokenizer.padding_side = 'left'" in said.stdout
    assert said.stdout.endswith("3 traps found. 1 set and harmless; --all lists them.\n")
    form = json.loads(command("lint", "--model", str(place), "--json").stdout)
    assert form["traps"] == 3
    assert [item["kind"] for item in form["findings"]] == ["trap", "trap", "trap", "harmless"]


def test_lint_finds_nothing_in_the_tiny_model(command: Command) -> None:
    said = command("lint", "--model", str(Path(provenance.__path__[0]) / "data" / "tiny"))
    assert (said.returncode, said.stdout) == (0, "no traps found.\n")


@pytest.mark.parametrize(
    ("files", "said"),
    [({}, "holds none of"), ({"config": "{"}, "is not JSON"), ({"generation_config": "[]"}, "and not a table")],
)
def test_a_folder_that_is_no_model_is_said_in_one_sentence(files: dict[str, str], said: str, tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=said):
        traps.of_folder(folder(tmp_path, **files))
    with pytest.raises(BadFile, match="there is no folder"):
        traps.of_folder(tmp_path / "none")


def test_lint_reads_a_recorded_run(command: Command, db: Path) -> None:
    model = models.llama()
    provenance.init(db=db, writer="off")
    provenance.wrap(model)
    model.generate(models.tensor(), do_sample=False, max_new_tokens=3, repetition_penalty=1.2, top_p=0.9)
    assert provenance.flush()
    said = command("lint", "last")
    assert said.returncode == 1, said.stderr
    assert "generation.repetition_penalty = 1.2, set by call" in said.stdout
    assert "1 trap found. 1 set and harmless" in said.stdout
    assert command("lint", "last", "--model", "x").returncode == 2
    model.generate(models.tensor(), do_sample=False, max_new_tokens=3)
    assert provenance.flush()
    assert command("lint").returncode == 0
