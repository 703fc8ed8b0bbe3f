"""A lock holds what can act and nothing else, survives the trip through its file, and tells drift from noise."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provenance.catalogue.fields import table
from provenance.determinism import lock
from provenance.errors import BadFile, BadSetting
from provenance.facts import Field

CPU = [Field("torch.version", "2.13.0+cpu"), Field("device.in_use", ["cpu"])]


def _table(*fields: Field) -> dict[str, Field]:
    return {item.name: item for item in (*CPU, *fields)}


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
    found = lock.check(_kept(tmp_path, now), now)
    assert (found.code, found.changed, found.blind) == (0, [], [])


def test_drift_is_told_by_effect_most_telling_first(tmp_path: Path) -> None:
    before = _table(Field("cpu.model", "x"), Field("torch.num_threads", 2), Field.unset("env.OMP_NUM_THREADS"))
    now = _table(
        Field("cpu.model", "y"), Field("torch.num_threads", 1), Field("env.OMP_NUM_THREADS", "1"),
        Field("lib.editable_installs", ["mine"]), Field("os.kernel", "other"),
    )  # fmt: skip
    found = lock.check(_kept(tmp_path, before), now)
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
    assert lock.check(_kept(tmp_path, before), now).code == 0
    on = _table(Field("torch.deterministic_algorithms", True), Field("torch.fill_uninitialized_memory", True))
    assert lock.check(_kept(tmp_path, before), on).code == 1


@pytest.mark.parametrize("pattern", ["cpu.model", "cpu.*", "*.model"])
def test_allowed_drift_is_told_and_passes(tmp_path: Path, pattern: str) -> None:
    kept = _kept(tmp_path, _table(Field("cpu.model", "x")))
    found = lock.check(kept, _table(Field("cpu.model", "y")), allow=[pattern])
    assert (found.code, [item.allowed for item in found.changed]) == (0, [True])


def test_a_field_that_may_vary_is_left_out(tmp_path: Path) -> None:
    kept = _kept(tmp_path, _table(Field("cpu.model", "x")))
    found = lock.check(kept, _table(Field("cpu.model", "y")), vary=["cpu.model"])
    assert (found.code, found.changed, found.varied) == (0, [], ["cpu.model"])


def test_a_name_that_no_field_has_is_refused() -> None:
    with pytest.raises(BadSetting, match=r"no field is called 'cpu.modl'; did you mean 'cpu.model'\?"):
        lock.compare(_table(), _table(), allow=["cpu.modl"])


def test_what_is_not_known_now_is_no_agreement(tmp_path: Path) -> None:
    kept = _kept(tmp_path, _table(Field("cpu.model", "x")))
    found = lock.check(kept, _table(Field.unknown("cpu.model", "the file could not be read")))
    assert found.code == 3
    assert [(gap.name, gap.because) for gap in found.blind] == [
        ("cpu.model", "not known in B: the file could not be read")
    ]
    assert lock.check(kept, _table()).code == 3
    assert lock.check(kept, _table(), allow=["cpu.model"]).code == 0


def test_what_was_open_when_locked_promises_nothing(tmp_path: Path) -> None:
    kept = _kept(tmp_path, _table(Field.unknown("cpu.model", "why")))
    assert lock.check(kept, _table(Field("cpu.model", "y"))).code == 0


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
    found = lock.check(
        _kept(tmp_path, _table(driver)), {**_table(driver), "device.in_use": Field("device.in_use", ["cuda"])}
    )
    assert [item.name for item in found.changed] == ["device.in_use"]
    assert [(gap.name, gap.because) for gap in found.open] == [("gpu.driver_version", "not held in A")]


def test_a_locked_checkpoint_says_nothing_of_the_model_in_memory(tmp_path: Path) -> None:
    kept = _kept(tmp_path, _table(Field("weights.files_root", "p1:sha256:00")))
    run = _table(Field("weights.files_root", "p1:sha256:00"), Field("model.dtype", "float32"))
    found = lock.diff(kept, lock.Lock(run))
    assert (found.code, [gap.name for gap in found.open]) == (0, ["model.dtype"])


def test_another_catalogue_may_know_fields_that_the_lock_does_not(tmp_path: Path) -> None:
    path = tmp_path / "provenance.lock"
    text = lock.dumps(_table(), {})
    path.write_text(text.replace("catalogue = 1", "catalogue = 99"), encoding="utf-8")
    assert lock.check(lock.read(path), _table(Field("cpu.model", "new"))).code == 0


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
