"""Engines that need a GPU or a compiler, as far as their faces go: settings, methods and results laid out as theirs are.

Laid out after vLLM 0.33.0 (``LLM.llm_engine.vllm_config``, ``SamplingParams``, ``RequestOutput``), SGLang 0.5.23
(``Engine.server_args``, dicts with ``meta_info``), TensorRT-LLM 1.3 (``LLM.args``) and llama-cpp-python 0.3.36
(``Llama.context_params``, ``create_completion``). They compute nothing: each token is a function of the prompt.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest


def load(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let the process seem to have loaded some packages."""
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


def tokens(prompt: Any, count: int) -> list[int]:
    """Make the tokens that follow a prompt."""
    start = sum(prompt) if isinstance(prompt, list) else sum(map(ord, prompt))
    return [(start + 7 * place) % 50 for place in range(count)]


# -- vLLM -------------------------------------------------------------------------------------------


class Mode(Enum):
    """A setting that is a member of an enumeration."""

    NONE = 0
    VLLM_COMPILE = 3


@dataclass
class SamplingParams:
    """The parameters, brought into order as vLLM does in ``__post_init__``."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    max_tokens: int = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    structured_outputs: Any = None
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if self.temperature < 1e-5:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0


class Requests:
    """What both kinds of LLM answer with."""

    def _answer(self, item: Any, params: SamplingParams) -> Any:
        ids = item["prompt_token_ids"] if isinstance(item, dict) else [ord(letter) for letter in item]
        if not ids:
            raise ValueError("The decoder prompt cannot be empty")
        outputs = []
        for index in range(params.n):
            out = tokens(ids, params.max_tokens)
            logprobs = [{token: SimpleNamespace(logprob=-0.5, rank=1, decoded_token="x")} for token in out]
            outputs.append(
                SimpleNamespace(
                    index=index, text=f"text {index}", token_ids=out, cumulative_logprob=None, finish_reason="length",
                    logprobs=logprobs if params.logprobs else None, stop_reason=None,
                )
            )  # fmt: skip
        text = None if isinstance(item, dict) else item
        return SimpleNamespace(request_id="0", prompt=text, prompt_token_ids=ids, outputs=outputs, num_cached_tokens=3)


class LLM(Requests):
    """``vllm.LLM``."""

    def __init__(self, model: str = "org/tiny", **changes: Any) -> None:
        model_config = {"model": model, "dtype": "bfloat16", "seed": 0, "max_model_len": 128, "quantization": None}
        config = SimpleNamespace(
            model_config=SimpleNamespace(**{**model_config, **changes}),
            cache_config=SimpleNamespace(cache_dtype="auto", block_size=16, enable_prefix_caching=True),
            parallel_config=SimpleNamespace(tensor_parallel_size=2),
            compilation_config=SimpleNamespace(mode=Mode.VLLM_COMPILE, pass_config={"fuse": True}),
            speculative_config=None, optimization_level=2,
        )  # fmt: skip
        self.llm_engine = SimpleNamespace(vllm_config=config)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what the checkpoint asks for."""
        return SamplingParams(temperature=0.6, top_k=20)

    def generate(
        self, prompts: Any, sampling_params: Any = None, *, use_tqdm: bool = True, lora_request: Any = None
    ) -> list[Any]:
        """Answer every prompt."""
        many = [prompts] if isinstance(prompts, (str, dict)) else prompts
        params = sampling_params or self.get_default_sampling_params()
        return [self._answer(item, params[n] if isinstance(params, list) else params) for n, item in enumerate(many)]

    def chat(self, messages: Any, sampling_params: Any = None, tools: Any = None) -> list[Any]:
        """Answer a conversation."""
        return self.generate("".join(item["content"] for item in messages), sampling_params)


LLM.__module__ = "vllm.entrypoints.llm"


# -- SGLang -----------------------------------------------------------------------------------------


class Engine:
    """``sglang.Engine``."""

    def __init__(self, **changes: Any) -> None:
        settings = {"model_path": "org/tiny", "dtype": "auto", "tp_size": 1, "attention_backend": "triton", "random_seed": 7,
                    "api_key": "sk-not-to-be-read", "watermark_config": {"keys": [1, 2]}}  # fmt: skip
        self.server_args = SimpleNamespace(**{**settings, **changes})

    def generate(
        self, prompt: Any = None, sampling_params: Any = None, input_ids: Any = None, stream: bool = False
    ) -> Any:
        """Answer one prompt with a dict, several with a list, or piece by piece."""
        given = prompt if prompt is not None else input_ids
        if stream:
            return (self._answer(given, count) for count in (1, 2, 3))
        if isinstance(given, list) and not isinstance(given[0], int):
            return [self._answer(item, 3) for item in given]
        return self._answer(given, 3)

    @staticmethod
    def _answer(prompt: Any, count: int) -> dict[str, Any]:
        meta = {"id": "a", "finish_reason": {"type": "stop", "matched": 2} if count == 3 else None, "prompt_tokens": len(prompt),
                "completion_tokens": count, "cached_tokens": 1}  # fmt: skip
        return {"text": "abc"[:count], "output_ids": tokens(prompt, count), "meta_info": meta}


Engine.__module__ = "sglang.srt.entrypoints.engine"


# -- TensorRT-LLM -----------------------------------------------------------------------------------


class TensorLLM(Requests):
    """``tensorrt_llm.LLM``: results as vLLM's, settings under ``args``; one prompt gives one result."""

    def __init__(self) -> None:
        self.args = SimpleNamespace(
            model="org/tiny", dtype="float16", backend="pytorch", tensor_parallel_size=1, attn_backend="TRTLLM",
            kv_cache_config=SimpleNamespace(dtype="auto", enable_block_reuse=True), speculative_config=None,
        )  # fmt: skip

    def generate(self, inputs: Any, sampling_params: Any = None) -> Any:
        """Answer a prompt, or a list of them."""
        params = sampling_params or SamplingParams(max_tokens=2)
        found = [self._answer(item, params) for item in (inputs if isinstance(inputs, list) else [inputs])]
        return found if isinstance(inputs, list) else found[0]


TensorLLM.__name__ = "LLM"
TensorLLM.__module__ = "tensorrt_llm.llmapi.llm"


# -- llama.cpp --------------------------------------------------------------------------------------


class Llama:
    """``llama_cpp.Llama``: keeps the ids of the last call, whose beginning the next may reuse."""

    def __init__(self, model_path: str = "", n_ctx: int = 64, seed: int = 0xFFFFFFFF) -> None:
        self.model_path, self._n_ctx, self._seed = model_path, n_ctx, seed or 0xFFFFFFFF
        self.model_params = SimpleNamespace(n_gpu_layers=0, split_mode=1, main_gpu=0, use_mmap=True)
        self.context_params = SimpleNamespace(
            n_ctx=n_ctx, n_ubatch=64, rope_freq_base=0.0, rope_freq_scale=0.0, rope_scaling_type=-1, offload_kqv=True,
            flash_attn_type=0, type_k=1, type_v=1,
        )  # fmt: skip
        self.tensor_split = self.kv_overrides = self.lora_path = self.draft_model = None
        self.n_batch, self.n_threads, self.n_threads_batch, self.numa = 64, 1, 2, 0
        self.lora_scale, self.chat_format, self.last_n_tokens_size = 1.0, "llama-2", 64
        self._held: list[int] = []

    @property
    def n_tokens(self) -> int:
        """Return how many ids are held."""
        return len(self._held)

    @property
    def _input_ids(self) -> Any:
        return np.array(self._held, dtype=np.intc)

    def n_ctx(self) -> int:
        """Return the size of the context."""
        return self._n_ctx

    def create_completion(
        self, prompt: Any, max_tokens: int = 3, temperature: float = 0.8, top_k: int = 40, stop: Any = (),
        seed: int | None = None, stream: bool = False, grammar: Any = None,
    ) -> Any:  # fmt: skip
        """Complete a prompt, at once or piece by piece."""
        pieces = self._pieces(prompt, max_tokens, seed)
        if stream:
            return pieces
        text = "".join(piece["choices"][0]["text"] for piece in pieces)
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": max_tokens,
            "total_tokens": len(prompt) + max_tokens,
        }
        choice = {"text": text, "index": 0, "logprobs": None, "finish_reason": "length"}
        return {"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": usage}

    def _pieces(self, prompt: Any, count: int, seed: int | None) -> Iterator[Any]:
        ids = list(prompt) if isinstance(prompt, list) else [ord(letter) for letter in prompt]
        if len(ids) >= self._n_ctx:
            raise ValueError(f"Requested tokens ({len(ids)}) exceed context window of {self._n_ctx}")
        self._seed = seed if seed is not None else self._seed
        out = tokens(ids, count)
        self._held = ids + out[:-1]
        for place, token in enumerate(out):
            reason = "length" if place == count - 1 else None
            yield {"choices": [{"text": chr(97 + token % 26), "index": 0, "logprobs": None, "finish_reason": reason}]}

    def __call__(self, prompt: Any, **options: Any) -> Any:
        return self.create_completion(prompt=prompt, **options)

    def create_chat_completion(self, messages: Any, temperature: float = 0.2, max_tokens: int = 3) -> Any:
        """Answer a conversation."""
        found = self.create_completion("".join(item["content"] for item in messages), max_tokens, temperature)
        message = {"role": "assistant", "content": found["choices"][0].pop("text")}
        return {**found, "choices": [{**found["choices"][0], "message": message}]}


Llama.__module__ = "llama_cpp.llama"
