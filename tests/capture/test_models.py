"""Which weights a call ran on: told from the tensors in memory, late, without holding on to anything."""

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from transformers import LlamaForCausalLM

import provenance
from provenance import recorder as recorders
from provenance import writer
from provenance.capture import models as watching
from provenance.catalogue.fields import spec
from provenance.facts import Noted, Run, State, WeightsManifest
from provenance.fingerprint import files, weights
from provenance.fingerprint.cache import Look
from tests.fakes import models


@pytest.fixture(autouse=True)
def _no_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVENANCE_WRITER", "off")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Hold all hashing back until the event is set."""
    opened = threading.Event()
    entry = weights.entry

    def waiting(*arguments: Any) -> Any:
        assert opened.wait(30)
        return entry(*arguments)

    monkeypatch.setattr(weights, "entry", waiting)
    return opened


def _say(model: Any) -> Any:
    return model.generate(models.tensor(), max_new_tokens=2)


def _hashed() -> None:
    """Wait until whatever is being hashed is."""
    recorder = recorders.current()
    assert recorder is not None
    for job in recorder.jobs:
        job.join(30)
        assert not job.is_alive()


def _root(run: Run) -> Any:
    found = run.fields["weights.loaded_root"]
    assert found.state is State.VALUE, found
    return found.value


def _load(run: Run) -> Any:
    return run.fields["context.load"].value


def _true_root(model: Any) -> str:
    return weights.of_tensors(model).root


def _bindings(db: Path) -> list[Noted]:
    return [record for record in models.journal(db) if isinstance(record, Noted) and record.kind == "binding"]


def test_the_digest_is_bound_to_calls_that_ended_before_it_was_known(gate: threading.Event, db: Path) -> None:
    model = provenance.wrap(models.llama())
    _say(model)
    _say(model)
    assert _bindings(db) == []
    gate.set()
    _hashed()
    _say(model)
    early, next_, late = models.runs(db)
    assert _root(early) == _root(next_) == _root(late) == _true_root(model)
    assert _load(early) == _load(late)
    assert early.digests["weights"] == late.digests["weights"]


def test_while_hashing_is_not_done_the_root_is_unknown_and_says_so(gate: threading.Event, db: Path) -> None:
    model = provenance.wrap(models.llama())
    _say(model)
    recorder = recorders.current()
    assert recorder is not None
    writer.drain(recorder.places)
    (run,) = models.stored(db)
    assert run.fields["weights.loaded_root"].reason == "not hashed yet"
    gate.set()
    assert _root(models.last(db)) == _true_root(model)


def test_a_call_between_digest_and_binding_is_not_lost(monkeypatch: pytest.MonkeyPatch, db: Path) -> None:
    """A call that begins and ends while the binding is being written has its root too."""
    model = provenance.wrap(models.llama())
    recorder = recorders.current()
    assert recorder is not None
    note = recorder.note
    calls: list[Any] = []

    def late(kind: str, digest: bytes, document: bytes) -> int:
        if kind == "binding" and not calls:
            calls.append(_say(model))  # in the hashing thread, so that nothing is left to chance
        return int(note(kind, digest, document))

    monkeypatch.setattr(recorder, "note", late)
    _say(model)
    _hashed()
    assert len(calls) == 1
    assert [_root(run) for run in models.runs(db)] == [_true_root(model)] * 2


def _in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] += 1.0


def _buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(2)


def _replaced(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)


def _cast(model: Any) -> None:
    model.to(torch.bfloat16)


def _module(model: Any) -> None:
    model.model.layers[0].mlp = models.llama(5).model.layers[0].mlp


def _loaded(model: Any) -> None:
    model.load_state_dict(models.llama(5).state_dict())


def _optimised(model: Any) -> None:
    step = torch.optim.SGD(model.parameters(), lr=0.1)
    model(models.tensor(), labels=models.tensor()).loss.backward()
    step.step()


@pytest.mark.parametrize("change", [_in_place, _buffer, _replaced, _cast, _module, _loaded, _optimised])
def test_a_changed_model_is_a_new_load_with_a_new_root(change: Callable[[Any], None], db: Path) -> None:
    model = provenance.wrap(models.llama())
    _say(model)
    _hashed()
    before = _true_root(model)
    change(model)
    _say(model)
    _say(model)
    first, second, third = models.runs(db)
    assert (_root(first), _root(second)) == (before, _true_root(model))
    assert before != _true_root(model)
    assert _root(second) == _root(third)
    assert _load(first) != _load(second) == _load(third)


def test_a_change_before_hashing_ended_makes_the_root_unknown_with_that_reason(gate: threading.Event, db: Path) -> None:
    model = provenance.wrap(models.llama())
    _say(model)
    _in_place(model)
    _say(model)
    gate.set()
    first, second = models.runs(db)
    assert first.fields["weights.loaded_root"].state is State.UNKNOWN
    assert first.fields["weights.loaded_root"].reason == "changed while hashed"
    assert _root(second) == _true_root(model)


def test_a_change_while_hashing_is_noticed_without_another_call(gate: threading.Event, db: Path) -> None:
    model = provenance.wrap(models.llama())
    _say(model)
    _in_place(model)
    gate.set()
    assert models.last(db).fields["weights.loaded_root"].reason == "changed while hashed"


def test_a_process_that_ends_before_hashing_did_says_so(gate: threading.Event, db: Path) -> None:
    model = provenance.wrap(models.llama())
    _say(model)
    recorder = recorders.current()
    assert recorder is not None
    recorder.closing.set()
    gate.set()
    assert models.last(db).fields["weights.loaded_root"].reason == "process ended"


def test_nothing_that_leaves_the_weights_alone_makes_a_new_load(db: Path) -> None:
    model = provenance.wrap(models.llama())
    _say(model)
    _hashed()
    model.generate(models.tensor(), max_new_tokens=3, do_sample=True, num_beams=2)
    model.generation_config.temperature = 0.5
    with torch.no_grad():
        model(models.tensor())
    _say(model)
    loads = {_load(run) for run in models.runs(db)}
    assert len(loads) == 1


def test_what_acts_without_a_tensor_is_seen_too(db: Path) -> None:
    model = provenance.wrap(models.llama())
    _say(model)
    model.train()
    _say(model)
    handle = model.lm_head.register_forward_hook(lambda module, inputs, output: output)
    _say(model)
    handle.remove()
    training = [run.fields["model.training"].value for run in models.runs(db)]
    hooks = [run.fields["model.forward_hooks"].value for run in models.runs(db)]
    assert training == [False, True, True]
    assert hooks[2] == int(str(hooks[1])) + 1


def test_equal_weights_have_one_root_whatever_holds_them(db: Path) -> None:
    one, other = provenance.wrap(models.llama()), provenance.wrap(models.llama())
    _say(one)
    _say(other)
    first, second = models.runs(db)
    assert _root(first) == _root(second)
    assert _load(first) != _load(second)


def test_tied_weights_are_listed_under_both_names_and_hashed_once(monkeypatch: pytest.MonkeyPatch, db: Path) -> None:
    model = provenance.wrap(models.gpt2())
    digested = []
    digest = weights._digest

    def counted(tensor: Any, stop: Any) -> str:
        digested.append(tensor.data_ptr())
        return digest(tensor, stop)

    monkeypatch.setattr(weights, "_digest", counted)
    _say(model)
    _hashed()
    (manifest,) = [record for record in models.journal(db) if isinstance(record, Noted) and record.kind == "weights"]
    entries = {entry.name: entry for entry in WeightsManifest.read(manifest.document).entries}
    assert entries["lm_head.weight"].sha256 == entries["transformer.wte.weight"].sha256
    assert digested.count(model.lm_head.weight.data_ptr()) == 1
    assert models.last(db).fields["model.tied_weights"].value is True


def test_untied_weights_of_equal_bytes_are_another_model_only_by_what_they_hold(db: Path) -> None:
    model = provenance.wrap(models.gpt2())
    _say(model)
    _hashed()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    _say(model)
    first, second = models.runs(db)
    assert _load(first) != _load(second)
    assert _root(first) == _root(second)


# -- what is hashed ---------------------------------------------------------------------------------


def test_weights_off_hashes_nothing_and_every_run_says_so(monkeypatch: pytest.MonkeyPatch, db: Path) -> None:
    def refuse(*arguments: Any) -> Any:
        raise AssertionError("something was hashed")

    monkeypatch.setattr(weights, "_digest", refuse)
    provenance.init(weights="off")
    model = provenance.wrap(models.llama())
    _say(model)
    with pytest.raises(ValueError, match="strictly positive"):
        model.generate(models.tensor(), max_new_tokens=2, repetition_penalty=-1.0)
    for run in models.runs(db):
        assert run.fields["weights.loaded_root"].reason == "hashing is off (weights=off)"
        assert "weights.files_root" not in run.fields


def _saved(folder: Path) -> Any:
    models.llama().save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("mode", ["tensors", "files"])
def test_the_files_of_a_checkpoint_are_hashed(mode: str, tmp_path: Path, db: Path) -> None:
    provenance.init(weights=mode)
    model = provenance.wrap(_saved(tmp_path / "tiny"))
    _say(model)
    _hashed()
    _say(model)
    expected = files.of_files(tmp_path / "tiny", lambda: False)[0]
    assert "model.safetensors" in [entry.name for entry in expected.entries]
    for run in models.runs(db):
        assert run.fields["weights.files_root"].value == expected.root
        if mode == "tensors":
            assert _root(run) == _true_root(model)
        else:
            assert run.fields["weights.loaded_root"].reason == "tensors in memory are not hashed (weights=files)"


def test_files_are_read_once_and_a_digest_from_a_cache_says_so(
    tmp_path: Path, db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Look, "settled", lambda *_: True)
    provenance.init(weights="files")
    found: list[dict[str, Any]] = []
    for _ in range(2):
        model = provenance.wrap(
            _saved(tmp_path / "tiny") if not found else LlamaForCausalLM.from_pretrained(tmp_path / "tiny")
        )
        _say(model)
        _hashed()
        _say(model)
        found.append([orjson.loads(item.document) for item in _bindings(db) if item.digest != bytes(32)][-1])
    assert found[0]["root"] == found[1]["root"]
    assert [item.get("how") for item in found] == [None, "cached"]
    assert (Path.home() / ".cache" / "provenance" / "digests").exists()


def test_the_model_that_drafts_is_known_too(gate: threading.Event, tmp_path: Path, db: Path) -> None:
    model, draft = provenance.wrap(models.llama()), _saved(tmp_path / "draft").to(torch.bfloat16).to(torch.float32)
    for _ in range(2):
        model.generate(models.tensor(), max_new_tokens=4, assistant_model=draft)
        gate.set()
        _hashed()
    first, second = models.runs(db)
    assert first.fields["draft.weights_root"].reason == "not hashed yet"
    assert second.fields["draft.weights_root"].value == _true_root(draft) != _true_root(model)
    assert _root(first) == _root(second) == _true_root(model)
    assert second.fields["draft.class"].value == "transformers.models.llama.modeling_llama.LlamaForCausalLM"
    assert str(second.fields["draft.name_or_path"].value).endswith("draft")
    assert second.fields["draft.dtype"].value == "float32"
    assert second.fields["draft.revision"].reason == "it was loaded from a folder, which has no revision"
    assert [name for name in second.fields if name.startswith("draft.") and spec(name).group == "other"] == []
    _say(model)
    assert [name for name in models.last(db).fields if name.startswith("draft.")] == []


def test_that_the_tensors_in_files_cannot_be_told_is_counted_and_takes_nothing_from_the_call(
    tmp_path: Path, db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fired = []

    def broken(*_: object) -> None:
        fired.append("_inside")
        raise RuntimeError("broken")

    provenance.init(weights="files")
    plain = _saved(tmp_path / "tiny")
    expected = plain.generate(models.tensor(), max_new_tokens=4, do_sample=False)
    monkeypatch.setattr(watching.Job, "_inside", broken)
    model = provenance.wrap(plain)
    for _ in range(2):
        assert torch.equal(model.generate(models.tensor(), max_new_tokens=4, do_sample=False), expected)
        _hashed()
    recorder = recorders.current()
    assert recorder is not None
    assert (fired, recorder.errors) == (["_inside"], 1)
    last = models.last(db).fields
    assert last["weights.files_root"].known
    assert last["weights.loaded_root"].reason == "RuntimeError while hashed"


def test_weights_files_without_files_says_why(db: Path) -> None:
    provenance.init(weights="files")
    model = provenance.wrap(models.llama())
    _say(model)
    _hashed()
    _say(model)
    for run in models.runs(db):
        assert run.fields["weights.loaded_root"].reason == "the model was not loaded from files"


def test_weights_that_have_no_bytes_say_why_in_every_run(db: Path) -> None:
    class Packed(torch.nn.Parameter):  # type: ignore[misc]
        """Stands for a quantised tensor, whose bytes are not its value."""

    model = models.llama()
    model.lm_head.weight = Packed(model.lm_head.weight.detach())
    provenance.wrap(model)
    _say(model)
    _hashed()
    _say(model)
    reasons = [run.fields["weights.loaded_root"].reason for run in models.runs(db)]
    assert len(reasons) == 2
    assert all("lm_head.weight is a" in reason and "whose bytes are not its value" in reason for reason in reasons)


def test_files_are_hashed_even_where_tensors_cannot_be(tmp_path: Path, db: Path) -> None:
    class Packed(torch.nn.Parameter):  # type: ignore[misc]
        """Stands for a quantised tensor."""

    model = _saved(tmp_path / "tiny")
    model.lm_head.weight = Packed(model.lm_head.weight.detach())
    _say(provenance.wrap(model))
    run = models.last(db)
    assert run.fields["weights.files_root"].value == files.of_files(tmp_path / "tiny", lambda: False)[0].root
    assert "whose bytes are not its value" in run.fields["weights.loaded_root"].reason


def test_a_second_stream_has_the_manifest_of_a_model_hashed_before(db: Path) -> None:
    """Another store, or a forked child's stream, knows nothing of what the first one holds."""
    model = provenance.wrap(models.llama())
    _say(model)
    first = models.last(db)
    other = db.with_name("other.db")
    provenance.init(other)
    _say(model)
    second = models.last(other)
    assert first.run_id != second.run_id
    assert _root(first) == _root(second) == _true_root(model)


# -- nothing is held --------------------------------------------------------------------------------


def test_a_deleted_model_is_gone(db: Path) -> None:
    model = provenance.wrap(models.llama(), tokenizer=models.letters())
    _say(model)
    with pytest.raises(ValueError, match="strictly positive"):
        model.generate(models.tensor(), max_new_tokens=2, repetition_penalty=-1.0)
    _hashed()
    known, key = weakref.ref(model), id(model)
    tensors = [weakref.ref(item) for item in model.parameters()]
    assert key in watching.MODELS._watched
    del model
    gc.collect()
    assert known() is None
    assert [item for item in tensors if item() is not None] == []
    assert key not in watching.MODELS._watched
    assert len(models.runs(db)) == 2


def test_an_instrumented_model_needs_no_collector_to_be_gone() -> None:
    provenance.instrument()
    model = models.llama()
    _say(model)
    _hashed()
    gc.collect()
    gc.disable()
    try:
        known = weakref.ref(model)
        del model
        assert known() is None
    finally:
        gc.enable()


def test_hashing_keeps_no_tensor_alive(gate: threading.Event, db: Path) -> None:
    model = provenance.wrap(models.llama())
    _say(model)
    tensors = [weakref.ref(item) for item in model.parameters()]
    provenance.uninstrument(model)
    del model
    gc.collect()
    assert sum(item() is not None for item in tensors) <= 1  # the one whose turn it is
    gate.set()
    _hashed()
    assert [item for item in tensors if item() is not None] == []
    assert models.last(db).fields["weights.loaded_root"].reason == "a tensor was released while it was hashed"


def test_a_new_model_at_an_old_address_is_a_new_model(db: Path) -> None:
    loads = []
    for seed in range(6):
        model = provenance.wrap(models.llama(seed))
        _say(model)
        _hashed()
        loads.append(_true_root(model))
        del model
        gc.collect()
    assert [_root(run) for run in models.runs(db)] == loads
    assert len(set(loads)) == 6


def test_threads_that_meet_at_a_new_model_make_one_load(db: Path) -> None:
    model = provenance.wrap(models.llama())
    barrier = threading.Barrier(6)

    def work() -> None:
        barrier.wait()
        _say(model)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({_load(run) for run in models.runs(db)}) == 1


# -- beneath a cast ---------------------------------------------------------------------------------


def test_the_parameters_are_known_in_the_types_that_they_may_be_cast_to(
    monkeypatch: pytest.MonkeyPatch, db: Path
) -> None:
    plain, cast = provenance.wrap(models.llama()), provenance.wrap(models.llama().bfloat16())
    for model in (plain, cast):
        _say(model)
        _hashed()
        _say(model)
    one, other = models.runs(db)[1].fields, models.runs(db)[3].fields
    assert one["weights.loaded_root"] != other["weights.loaded_root"]
    assert one["weights.parameters_root"] != other["weights.parameters_root"]
    assert one["weights.bfloat16_root"] == other["weights.bfloat16_root"]
    assert one["weights.float16_root"].state is State.VALUE
    assert "bfloat16, which float16 does not hold" in other["weights.float16_root"].reason

    def broken(*arguments: Any) -> str:
        raise MemoryError

    monkeypatch.setattr(weights, "narrowed", broken)
    last = provenance.wrap(models.llama())
    _say(last)
    _hashed()
    _say(last)
    run = models.last(db)
    assert run.fields["weights.bfloat16_root"].reason == "MemoryError while cast"
    assert _root(run) == _true_root(last)
