"""Engines as fields: every path on its own, values in force, no secret, nothing imported."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from provenance.catalogue.fields import spec, table
from provenance.facts import State
from provenance.fingerprint import engines
from tests.conftest import Command
from tests.fakes import engines as fakes


def _read(engine: Any) -> dict[str, Any]:
    found = engines.runtime(engine)
    assert found is not None
    return dict(engines.fingerprint(engine, found).fields)


@pytest.fixture(autouse=True)
def _loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.load(monkeypatch, "vllm", "sglang", "llama_cpp", "tensorrt_llm")


def test_an_engine_is_known_by_its_class_and_only_where_its_package_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(fakes.Llama):
        """A subclass of the caller's own."""

    known = [fakes.LLM(), fakes.Engine(), Mine(), fakes.TensorLLM()]
    names = [getattr(engines.runtime(item), "name", None) for item in known]
    assert names == ["vllm", "sglang", "llama_cpp", "tensorrt_llm"]
    assert engines.runtime(SimpleNamespace(generate=print)) is None
    monkeypatch.delitem(sys.modules, "vllm")
    assert engines.runtime(fakes.LLM()) is None


def test_vllm_is_read_at_the_paths_of_its_own_settings() -> None:
    fields = _read(fakes.LLM(quantization="fp8"))
    assert fields["vllm.model_config.quantization"].value == "fp8"
    assert fields["vllm.parallel_config.tensor_parallel_size"].value == 2
    assert fields["vllm.compilation_config.mode"].value == "VLLM_COMPILE"
    assert fields["vllm.speculative_config.method"].state is State.UNSET  # nobody asked for speculation
    lacking = fields["vllm.watermark_config.algorithm"]
    assert (lacking.state, "absent in this version" in lacking.reason) == (State.UNKNOWN, True)
    assert (fields["engine.name"].value, fields["seed.engine"].value) == ("vllm", 0)
    assert fields["model.name_or_path"].value == "org/tiny"


def test_no_key_of_sglang_is_read_and_a_watermark_is_redacted() -> None:
    fields = _read(fakes.Engine(chat_template="Bearer abcdefghijklmnop"))
    assert "sglang.api_key" not in fields
    assert fields["sglang.watermark_config"].state is State.REDACTED
    assert fields["sglang.chat_template"].state is State.REDACTED  # it looks like a credential
    assert "sk-not" not in repr(fields)
    assert fields["sglang.attention_backend"].value == "triton"


def test_llama_cpp_is_read_as_it_was_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    fields = _read(fakes.Llama(str(tmp_path / "m.gguf"), n_ctx=32))
    assert (fields["llama_cpp.n_ctx"].value, fields["llama_cpp.n_threads_batch"].value) == (32, 2)
    assert (fields["llama_cpp.flash_attn"].value, fields["llama_cpp.model_path"].value) == (0, "~/m.gguf")
    assert fields["llama_cpp.op_offload"].state is State.UNKNOWN


def test_tensorrt_llm_is_read_from_its_arguments() -> None:
    fields = _read(fakes.TensorLLM())
    assert fields["tensorrt_llm.kv_cache_config.enable_block_reuse"].value is True
    assert fields["tensorrt_llm.speculative_config.decoding_type"].state is State.UNSET
    assert fields["seed.engine"].state is State.UNKNOWN


class Trap:
    """Settings of which one does harm."""

    def __getattr__(self, name: str) -> Any:
        if name == "cache_config":
            raise RuntimeError("the engine core is gone")
        raise AttributeError(name)


def test_one_reader_that_fails_costs_its_own_fields_only() -> None:
    engine = fakes.LLM()
    engine.llm_engine.vllm_config = Trap()
    fields = _read(engine)
    assert fields["vllm.cache_config.block_size"].reason == "RuntimeError: the engine core is gone"
    assert fields["engine.name"].value == "vllm"
    assert {name for name in fields if name.startswith("vllm.")} == set(engines.paths("vllm"))


def test_every_field_that_is_read_is_declared() -> None:
    for engine in (fakes.LLM(), fakes.Engine(), fakes.Llama(), fakes.TensorLLM()):
        assert [name for name in _read(engine) if spec(name).group == "other"] == []
    assert {f"llama_cpp.{name}" for name in engines.LLAMA} <= set(table())


def test_a_changed_setting_is_seen_and_an_unchanged_engine_is_not_read_again() -> None:
    engine = fakes.LLM()
    found = engines.runtime(engine)
    assert found is not None
    before = engines.snapshot(engine, found)
    assert engines.unchanged(before, engines.snapshot(engine, found))
    engine.llm_engine.vllm_config.cache_config.block_size = 32
    assert not engines.unchanged(before, engines.snapshot(engine, found))


def test_a_variable_that_nobody_listed_moves_the_digest_and_a_secret_does_not() -> None:
    one = engines.environ_digest("vllm", {"VLLM_NEW_SWITCH": "1"})
    assert one is not None
    assert one == engines.environ_digest("vllm", {"VLLM_NEW_SWITCH": "1", "VLLM_API_KEY": "x", "PATH": "/"})
    assert one != engines.environ_digest("vllm", {"VLLM_NEW_SWITCH": "0"})


def test_mlx_is_asked_only_where_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engines.process() == []
    fakes.load(monkeypatch, "mlx.core")
    monkeypatch.setattr(sys.modules["mlx.core"], "default_device", lambda: "Device(gpu, 0)", raising=False)
    (field,) = engines.process()
    assert (field.name, field.value) == ("mlx.default_device", "Device(gpu, 0)")


def test_reading_loads_no_engine(python: Command) -> None:
    code = (
        "import sys, provenance.fingerprint.engines as e\n"
        "assert e.runtime(object()) is None and e.process() == []\n"
        "sys.exit(any(name in sys.modules for name in ('vllm', 'sglang', 'llama_cpp', 'tensorrt_llm', 'mlx', 'torch')))"
    )
    assert python(code).returncode == 0
