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
    assert [item.name for item in found.context] == ["os.kernel"]
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
