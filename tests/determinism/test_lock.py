"""A lock holds what can act and nothing else, survives the trip through its file, and tells drift from noise."""

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provenance.catalogue.fields import table
from provenance.determinism import lock
from provenance.errors import BadFile, BadSetting
from provenance.facts import Field
from tests.fakes.records import is_one_sentence

CPU = [Field("torch.version", "2.13.0+cpu"), Field("device.in_use", ["cpu"])]


def _table(*fields: Field) -> dict[str, Field]:
    return {item.name: item for item in (*CPU, *fields)}


def _check(held: lock.Lock, now: dict[str, Field], **named: list[str]) -> lock.Comparison:
    """Compare a lock with fields that were read in the way that it was written in."""
    return lock.diff(held, lock.Lock(now, ran=held.ran), **named)


def _kept(tmp_path: Path, fields: dict[str, Field]) -> lock.Lock:
    path = tmp_path / "provenance.lock"
    path.write_text(lock.dumps(fields, {"from": "machine"}), encoding="utf-8")
    return lock.read(path)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(VALUES.filter(lambda value: value is not None))
def test_every_value_survives_the_file(value: object) -> None:
    import tomllib

    field = Field("cpu.model", value)
    form = tomllib.loads(lock.dumps({**_table(), "cpu.model": field}, {"from": "machine"}))
    assert lock._untoml(form["numeric"]["cpu.model"]) == value


def test_infinities_survive() -> None:
    import tomllib

    form = tomllib.loads(lock.dumps(_table(Field("cpu.model", [math.inf, -math.inf, -0.0])), {}))
    assert str(lock._untoml(form["numeric"]["cpu.model"])) == "[inf, -inf, -0.0]"


def test_only_what_can_act_is_kept(tmp_path: Path) -> None:
    kept = _kept(
        tmp_path,
        _table(
            Field("cpu.model", "x"),
            Field("os.kernel", "6.1"),  # effect none
            Field("gpu.driver_version", "580"),  # no CUDA device here
            Field.unset("env.OMP_NUM_THREADS"),
            Field.unknown("cpu.capability", "no reason at all"),
        ),
    )
    assert set(kept.fields) == {"torch.version", "device.in_use", "cpu.model", "cpu.capability"}
    assert kept.fields["cpu.capability"].reason == "unknown: no reason at all"


def test_the_same_machine_holds(tmp_path: Path) -> None:
    now = _table(Field("cpu.model", "x"), Field.unset("env.OMP_NUM_THREADS"))
    found = _check(_kept(tmp_path, now), now)
    assert (found.code, found.changed, found.blind) == (0, [], [])


def test_drift_is_told_by_effect_most_telling_first(tmp_path: Path) -> None:
    before = _table(Field("cpu.model", "x"), Field("torch.num_threads", 2), Field.unset("env.OMP_NUM_THREADS"))
    now = _table(
        Field("cpu.model", "y"), Field("torch.num_threads", 1), Field("env.OMP_NUM_THREADS", "1"),
        Field("lib.editable_installs", ["mine"]), Field("os.kernel", "other"),
    )  # fmt: skip
    found = _check(_kept(tmp_path, before), now)
    assert found.code == 1
    assert found.changed[0].name == "lib.editable_installs"
    assert {item.name for item in found.changed} == {
        "lib.editable_installs", "cpu.model", "torch.num_threads", "env.OMP_NUM_THREADS",
    }  # fmt: skip
    assert found.context == []  # the lock does not hold os.kernel, and nobody says that it differs
    changed = next(item for item in found.changed if item.name == "env.OMP_NUM_THREADS")
    assert changed.before.state.value == "unset"


def test_a_switch_without_its_condition_is_context(tmp_path: Path) -> None:
    off = Field("torch.deterministic_algorithms", False)
    before, now = _table(off), _table(off, Field("torch.fill_uninitialized_memory", True))
    assert _check(_kept(tmp_path, before), now).code == 0
    on = _table(Field("torch.deterministic_algorithms", True), Field("torch.fill_uninitialized_memory", True))
    assert _check(_kept(tmp_path, before), on).code == 1


@pytest.mark.parametrize("pattern", ["cpu.model", "cpu.*", "*.model"])
def test_allowed_drift_is_told_and_passes(tmp_path: Path, pattern: str) -> None:
    kept = _kept(tmp_path, _table(Field("cpu.model", "x")))
    found = _check(kept, _table(Field("cpu.model", "y")), allow=[pattern])
    assert (found.code, [item.allowed for item in found.changed]) == (0, [True])


def test_a_field_that_may_vary_is_left_out(tmp_path: Path) -> None:
    kept = _kept(tmp_path, _table(Field("cpu.model", "x")))
    found = _check(kept, _table(Field("cpu.model", "y")), vary=["cpu.model"])
    assert (found.code, found.changed, found.varied) == (0, [], ["cpu.model"])


def test_a_name_that_no_field_has_is_refused() -> None:
    with pytest.raises(BadSetting, match=r"no field is called 'cpu.modl'; did you mean 'cpu.model'\?"):
        lock.compare(_table(), _table(), allow=["cpu.modl"])


def test_what_is_not_known_now_is_no_agreement(tmp_path: Path) -> None:
    kept = _kept(tmp_path, _table(Field("cpu.model", "x")))
    found = _check(kept, _table(Field.unknown("cpu.model", "the file could not be read")))
    assert found.code == 3
    assert [(gap.name, gap.because) for gap in found.blind] == [
        ("cpu.model", "not known in B: the file could not be read")
    ]
    assert _check(kept, _table()).code == 3
    assert _check(kept, _table(), allow=["cpu.model"]).code == 0


def test_what_was_open_when_locked_promises_nothing(tmp_path: Path) -> None:
    kept = _kept(tmp_path, _table(Field.unknown("cpu.model", "why")))
    assert _check(kept, _table(Field("cpu.model", "y"))).code == 0


LOADED = Field("torch.inductor.max_autotune", False)
NOT_LOADED = Field.moot("torch.inductor.max_autotune", "the compiler is not loaded")


@pytest.mark.parametrize("held", [False, True], ids=["plain", "lock"])
def test_what_a_process_without_a_model_had_not_loaded_is_open(tmp_path: Path, held: bool) -> None:
    run, bare = _table(LOADED, Field("torch.compile.active", True)), _table(NOT_LOADED)
    here = _kept(tmp_path, bare) if held else lock.Lock(bare, ran=False)
    for found in (lock.diff(lock.Lock(run), here), lock.diff(here, lock.Lock(run))):
        assert (found.code, found.changed, found.blind) == (0, [], [])
        assert "torch.inductor.max_autotune" in [gap.name for gap in found.open]
    because = {gap.name: gap.because for gap in lock.diff(lock.Lock(run), here).open}
    assert because["torch.inductor.max_autotune"] == "the compiler is not loaded in B"


def test_between_two_runs_what_was_not_loaded_differs() -> None:
    one, other = lock.Lock(_table(LOADED)), lock.Lock(_table(NOT_LOADED))
    assert [item.name for item in lock.diff(one, other).changed] == ["torch.inductor.max_autotune"]


def test_a_process_without_a_model_still_tells_what_moved() -> None:
    run = lock.Lock(_table(LOADED, Field("torch.num_threads", 2), Field("model.dtype", "float32")))
    here = lock.Lock(_table(NOT_LOADED, Field("torch.num_threads", 1)), ran=False)
    found = lock.diff(run, here)
    assert (found.code, [item.name for item in found.changed]) == (1, ["torch.num_threads"])
    assert [gap.name for gap in found.open] == ["torch.inductor.max_autotune", "model.dtype"]


def test_what_could_not_be_read_without_a_model_is_no_such_excuse() -> None:
    run = lock.Lock(_table(Field("cpu.model", "x")))
    here = lock.Lock(_table(Field.unknown("cpu.model", "the file could not be read")), ran=False)
    assert (lock.diff(run, here).code, lock.diff(run, here).open) == (3, [])


def test_a_side_without_a_model_is_asked_under_the_model_of_the_other() -> None:
    fp32 = Field("torch.backends.mkldnn.matmul.fp32_precision", "ieee")
    half = [Field("device.in_use", ["cpu"]), Field("model.dtype", "float16"), Field("torch.autocast.cpu", "off")]
    run = {item.name: item for item in (fp32, *half)}
    here = {fp32.name: Field(fp32.name, "tf32"), "torch.autocast.cpu": half[2]}
    found = lock.diff(lock.Lock({fp32.name: fp32}, around=run), lock.Lock(here, ran=False))
    single = {**run, "model.dtype": Field("model.dtype", "float32")}
    acting = lock.diff(lock.Lock({fp32.name: fp32}, around=single), lock.Lock(here, ran=False))
    assert ([item.name for item in found.context], [item.name for item in acting.changed]) == ([fp32.name], [fp32.name])


def test_what_could_not_act_when_it_was_locked_is_open_where_it_acts(tmp_path: Path) -> None:
    driver = Field("gpu.driver_version", "580")
    found = _check(
        _kept(tmp_path, _table(driver)), {**_table(driver), "device.in_use": Field("device.in_use", ["cuda"])}
    )
    assert [item.name for item in found.changed] == ["device.in_use"]
    assert [(gap.name, gap.because) for gap in found.open] == [("gpu.driver_version", "not held in A")]


def test_a_locked_checkpoint_says_nothing_of_the_model_in_memory(tmp_path: Path) -> None:
    kept = _kept(tmp_path, _table(Field("weights.files_root", "p1:sha256:00")))
    run = _table(Field("weights.files_root", "p1:sha256:00"), Field("model.dtype", "float32"))
    found = lock.diff(kept, lock.Lock(run))
    assert (found.code, [gap.name for gap in found.open]) == (0, ["model.dtype"])


@pytest.mark.parametrize("version", [0, 2])
def test_another_catalogue_may_know_other_fields_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    before = _table(Field("cpu.model", "x"), Field("later.field", 1))
    monkeypatch.setattr(lock, "VERSION", version)
    kept = _kept(tmp_path, before)
    monkeypatch.undo()
    now = _table(Field("cpu.model", "x"), Field("env.OMP_NUM_THREADS", "1"))
    found = _check(kept, now)
    assert (found.code, found.changed, found.blind) == (0, [], [])
    assert [(gap.name, gap.because) for gap in found.open] == [
        ("env.OMP_NUM_THREADS", "not held in A"),
        ("later.field", "not recorded in B"),
    ]
    assert f"written with version {version} of the field catalogue, and this is version 1" in found.note
    moved = _check(kept, {**now, "cpu.model": Field("cpu.model", "y")})
    assert (moved.code, [item.name for item in moved.changed]) == (1, ["cpu.model"])
    assert _check(_kept(tmp_path, before), before).note == ""


# -- a lock that is not as it was written ------------------------------------------------------------

WHOLE = lock.dumps(
    _table(
        Field("cpu.model", "x"), Field("torch.num_threads", 2), Field("cpu.capability", 0.1), Field.unknown("torch.blas", "why"),
        Field("generation.top_p", [0.5, {"a": None}]), Field.moot("cache.triton", "triton is not loaded"),
    ),
    {"from": "machine"},
)  # fmt: skip


def _refused(tmp_path: Path, text: str) -> str:
    path = tmp_path / "cut.lock"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadFile, match=r"cut\.lock") as caught:
        lock.read(path)
    assert is_one_sentence(str(caught.value))
    return str(caught.value)


def test_a_lock_that_is_cut_anywhere_is_refused(tmp_path: Path) -> None:
    for length in range(len(WHOLE.rstrip())):
        said = _refused(tmp_path, WHOLE[:length])
        assert not re.search(r"KeyError|NoneType|'digest'", said), said
    half = WHOLE[: WHOLE.index("[open]")]
    assert "cut.lock is cut: it was written with 8 fields, and holds 6." in _refused(tmp_path, half)


def test_a_lock_without_one_of_its_tables_is_refused(tmp_path: Path) -> None:
    parts = re.split(r"(?m)^(?=\[)", WHOLE)
    assert len(parts) >= 6
    for n in range(1, len(parts)):
        _refused(tmp_path, "".join(parts[:n] + parts[n + 1 :]))


@pytest.mark.parametrize(
    ("old", "new"),
    [('"cpu.model" = "x"', '"cpu.model" = "y"'), ("catalogue = 1", "catalogue = 2"), ('from = "machine"', 'from = "run"'),
     ('"torch.num_threads" = 2\n', ""), ("[numeric]\n", '[numeric]\n"cpu.isa" = "new"\n'), ("fields = 8", "fields = 3"),
     ('"cpu.model" = "x"', '"cpu.model" = 1979-05-27'), ('digest = "p1', 'digest = "p2'), ("[numeric]", "[semantic.x]"),
     ("[open]", "[[open]]"), ('"torch.blas" = "unknown: why"', '"torch.blas" = 3'), ("[lock]\n", "[lock]\nunloaded = 3\n")],
)  # fmt: skip
def test_a_lock_that_was_edited_is_refused(tmp_path: Path, old: str, new: str) -> None:
    assert old in WHOLE
    assert re.search(r"edited by hand|is cut", _refused(tmp_path, WHOLE.replace(old, new)))


def test_comments_and_line_ends_may_change(tmp_path: Path) -> None:
    path = tmp_path / "provenance.lock"
    path.write_text(WHOLE.replace(lock.HEAD, "# ours\n").replace("\n", "\r\n"), encoding="utf-8", newline="")
    assert lock.read(path).fields["torch.num_threads"].value == 2


@pytest.mark.parametrize(
    "text", ["", "x", "[lock]", "[lock]\nformat = 1\n[semantic]\n[semantic]", "lock = 3", "[lock]\nformat = 7", "\x00"]
)
def test_what_is_no_lock_is_refused_with_a_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "provenance.lock"
    path.write_text(text)
    with pytest.raises(BadFile, match=r"provenance\.lock"):
        lock.read(path)


def test_facts_of_one_call_are_no_promise() -> None:
    assert lock.lasts("generation.temperature")
    assert lock.lasts("model.dtype")
    assert lock.lasts("torch.version")
    assert not lock.lasts("batch.size")
    assert not lock.lasts("seed.given")


def test_the_effects_of_the_catalogue_are_those_of_the_file() -> None:
    assert {spec.effect for spec in table().values()} == {*lock.ACTING, "none"}
