"""What an engine was asked and what it answered: prompts, sampling settings, ids, texts and reasons, per runtime.

Each engine has its own objects for one and the same thing; here they become payloads, sequences and fields. Content
(prompts, schemas, tools) is payload, or a keyed digest: never a plain digest, never a field.
"""

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from provenance.facts import BUFFER, FINISHES, ROLE, TEXT, VALUE, Field, Payload, SequenceEnd
from provenance.fingerprint.engines import shown
from provenance.integrity import buffers, digests
from provenance.integrity.values import encode

PROMPTS = ("prompts", "inputs", "prompt", "prompt_token_ids", "input_ids")
BESIDE = ("tools", "functions", "chat_template", "add_generation_prompt", "continue_final_message", "suffix",
          "chat_template_kwargs", "documents", "image_data", "audio_data", "video_data")  # fmt: skip
NOT_SETTINGS = {*PROMPTS, *BESIDE, "messages", "sampling_params", "use_tqdm", "stream", "model", "user", "self",
                "chat_template_content_format", "kwargs"}  # fmt: skip
# Settings that hold content of the caller's: a grammar, a schema, a tool.
SEALED = {"structured_outputs", "guided_decoding", "response_format", "json_schema", "regex", "ebnf", "structural_tag",
          "grammar", "tool_choice", "function_call", "extra_args", "custom_params", "watermarking"}  # fmt: skip
EOS, LENGTH, STOP, RETURNED, CUT, UNKNOWN = (
    FINISHES.index(name) for name in ("eos", "length", "stop_string", "returned", "cut", "unknown")
)
SCHEDULED = "the engine's scheduler chooses the batch"


class Asked(NamedTuple):
    """What a call was given: as it was called, and with the defaults of the method."""

    runtime: str
    method: str
    given: Mapping[str, Any]
    arguments: Mapping[str, Any]
    rows: int
    payloads: tuple[Payload, ...]
    facts: dict[str, Any]
    key: bytes
    before: Any  # llama.cpp: the ids whose cache the call may reuse


class Answer(NamedTuple):
    """What a call returned, as the end record wants it."""

    sequences: tuple[SequenceEnd, ...]
    payloads: tuple[Payload, ...]
    facts: dict[str, Any]


class Streamed(list[Any]):
    """The pieces of a result that came one by one."""


class One(NamedTuple):
    """One output sequence, in the words of no engine."""

    row: int
    ret: int
    finish: int
    n_input: int = 0
    n_output: int = 0
    ids: Any = None
    text: str | None = None
    value: Any = None
    logprobs: Any = None
    prompt_ids: Any = None
    prompt_text: str | None = None


def sealed(key: bytes, kind: str, value: object) -> str:
    """Return a keyed digest of content, to stand where the content itself must not."""
    return "hmac:" + digests.equality(key, kind, (encode(value),)).hex()


# -- what was asked ---------------------------------------------------------------------------------


def ask(
    runtime: str, method: str, given: Mapping[str, Any], arguments: Mapping[str, Any], key: bytes, engine: Any
) -> Asked:
    """Read the arguments of a call before it runs."""
    arguments = {**given, **arguments}
    if "messages" in arguments:
        items = _conversations(arguments["messages"])
    else:
        items = _prompts(next((arguments[name] for name in PROMPTS if arguments.get(name) is not None), None))
    beside = {name: arguments[name] for name in BESIDE if given.get(name) is not None}
    payloads = [payload for row, item in enumerate(items) for payload in _asked(item, beside, row)]
    facts: dict[str, Any] = {"batch.dynamic": runtime != "llama_cpp", "batch.size": 1}
    if runtime != "llama_cpp":
        facts["batch.size"] = Field.unknown("batch.size", SCHEDULED)
    tools = given.get("tools") or given.get("functions")
    if tools:
        facts["input.tools_digest"] = sealed(key, "tools", tools)
    before = None
    if runtime == "llama_cpp" and getattr(engine, "n_tokens", None):
        before = engine._input_ids.copy()
    return Asked(runtime, method, given, arguments, len(items), tuple(payloads), facts, key, before)


def _conversations(messages: Any) -> list[Any]:
    many = isinstance(messages, (list, tuple)) and bool(messages) and isinstance(messages[0], (list, tuple))
    return [{"messages": item} for item in (messages if many else [messages])]


def _prompts(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)) and not _is_ids(value):
        return list(value)
    return [value]


def _is_ids(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(type(item) is int for item in value)


def _asked(item: Any, beside: Mapping[str, Any], row: int) -> Iterable[Payload]:
    ids: Any = item if _is_ids(item) else item.get("prompt_token_ids") if isinstance(item, Mapping) else None
    if _is_ids(ids):
        yield Payload(ROLE["prompt.ids"], BUFFER, buffers.ids(ids or ()), row)
    rest = dict(beside)
    if isinstance(item, Mapping):
        rest |= {name: value for name, value in item.items() if name != "prompt_token_ids" or not _is_ids(ids)}
    elif not _is_ids(item):
        rest["prompt"] = item
    if rest:
        yield Payload(ROLE["arguments"], VALUE, encode(rest), row)


# -- what came back ---------------------------------------------------------------------------------


def read(asked: Asked, engine: Any, result: Any) -> Answer:
    """Read what a call returned. The result itself is not touched."""
    made = list(ANSWERS[asked.runtime](asked, engine, result))
    payloads, ends = [], []
    told = {(item.role, item.row) for item in asked.payloads}
    for one in made:
        ends.append(
            SequenceEnd(one.row, one.ret, one.n_input, one.n_output, 0, one.finish, math.nan, 0)
        )  # no engine pads a prompt that we see
        payloads += list(_answered(one, told))
    facts: dict[str, Any] = {}
    if asked.runtime == "llama_cpp":
        facts |= _llama_facts(asked, engine, made)
    else:
        facts["seed.request"] = _seeds(asked)
        facts["batch.prefix_cache_hit_tokens"] = _cached(asked, result)
    return Answer(tuple(ends), tuple(payloads), facts)


def _answered(one: One, told: set[tuple[int, int]]) -> Iterable[Payload]:
    for role, data in (("prompt.ids", one.prompt_ids), ("prompt.text", one.prompt_text)):
        if data is not None and one.ret == 0 and (ROLE[role], one.row) not in told:
            encoded = _text(data) if isinstance(data, str) else buffers.ids(data)
            yield Payload(ROLE[role], TEXT if isinstance(data, str) else BUFFER, encoded, one.row)
    if one.ids is not None:
        yield Payload(ROLE["output.ids"], BUFFER, buffers.ids(one.ids), one.row, one.ret)
    if one.text is not None:
        yield Payload(ROLE["output.text"], TEXT, _text(one.text), one.row, one.ret)
    if one.value is not None:
        yield Payload(ROLE["output.value"], VALUE, encode(one.value), one.row, one.ret)
    if one.logprobs is not None:
        yield Payload(ROLE["evidence.logprobs"], VALUE, encode(one.logprobs), one.row, one.ret)


def _text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def finish_of(reason: object, stopped_by: object = None) -> int:
    """Say in our words why an output ended: engines say ``stop`` for an end token and for a stop string alike."""
    if reason == "stop":
        return EOS if stopped_by is None else STOP
    return {"length": LENGTH, "abort": CUT, "content_filter": CUT, None: UNKNOWN}.get(
        str(reason) if reason else None, RETURNED
    )


def _objects(asked: Asked, engine: Any, result: Any) -> Iterable[One]:  # noqa: ARG001 - one form for all
    """Read the request outputs of vLLM and TensorRT-LLM."""
    for row, request in enumerate(result if isinstance(result, (list, tuple)) else [result]):
        prompt = getattr(request, "prompt_token_ids", None)
        for ret, item in enumerate(request.outputs):
            ids = list(item.token_ids)
            yield One(
                row, ret, finish_of(item.finish_reason, getattr(item, "stop_reason", None)), len(prompt or ()),
                len(ids), ids, item.text, None, _logprobs(getattr(item, "logprobs", None)),
                list(prompt) if prompt is not None else None, getattr(request, "prompt", None),
            )  # fmt: skip


def _logprobs(steps: Any) -> Any:
    """Write the log probabilities of vLLM as rows of id, value and rank; None where none were asked for."""
    if not steps:
        return None
    return [_step(step) if isinstance(step, Mapping) else shown(step) for step in steps]


def _step(step: Mapping[int, Any]) -> list[list[Any]]:
    return [[int(token), float(item.logprob), getattr(item, "rank", None)] for token, item in step.items()]


def _dicts(asked: Asked, engine: Any, result: Any) -> Iterable[One]:  # noqa: ARG001 - one form for all
    """Read the dicts of SGLang; of a stream the last piece of each prompt, which holds the whole text."""
    if isinstance(result, Streamed):
        result = list({item.get("index", 0): item for item in result}.values())
    items = result if isinstance(result, list) else [result]
    each = max(1, len(items) // max(1, asked.rows))
    for number, item in enumerate(items):
        meta = item.get("meta_info") or {}
        reason = meta.get("finish_reason") or {}
        reason = reason if isinstance(reason, Mapping) else {"type": reason}
        matched = reason.get("matched")
        ids = item.get("output_ids")
        logprobs = meta.get("output_top_logprobs") or meta.get("output_token_logprobs")
        yield One(
            number // each, number % each, finish_of(reason.get("type"), matched if isinstance(matched, str) else None),
            int(meta.get("prompt_tokens") or 0), int(meta.get("completion_tokens") or 0),
            list(ids) if ids else None, item.get("text"), None if ids else {"text": item.get("text")}, shown(logprobs),
        )  # fmt: skip


def _choices(asked: Asked, engine: Any, result: Any) -> Iterable[One]:
    """Read the completions of llama.cpp; of a stream, the pieces put together."""
    pieces = result if isinstance(result, Streamed) else [result]
    usage: Any = next((item["usage"] for item in pieces if item.get("usage")), {})
    texts: list[str] = []
    calls, logprobs, reason = [], [], None
    for choice in (choice for item in pieces for choice in item.get("choices", ())):
        message = choice.get("message") or choice.get("delta") or {}
        texts.append(choice.get("text") or message.get("content") or "")
        calls += [message["tool_calls"]] if message.get("tool_calls") else []
        logprobs += [choice["logprobs"]] if choice.get("logprobs") else []
        reason = choice.get("finish_reason") or reason
    text = "".join(texts)
    prompt, n_prompt = _llama_prompt(engine, usage)
    # The ids of the output are not told: the last one is sampled and never held, and a stop string cuts the text alone.
    value = {"text": text, "tool_calls": calls} if calls else {"text": text}
    stopped = UNKNOWN if reason == "stop" and asked.arguments.get("stop") else finish_of(reason)
    n_output = int(usage.get("completion_tokens", 0))
    yield One(0, 0, stopped, n_prompt, n_output, None, text, value, logprobs or None, prompt)


def _llama_prompt(engine: Any, usage: Mapping[str, Any]) -> tuple[list[int] | None, int]:
    """Take the prompt's ids from those that the engine holds, and their number."""
    count = usage.get("prompt_tokens")
    if not isinstance(count, int):
        return None, 0  # a stream does not say where the prompt ends
    return [int(token) for token in engine._input_ids[:count]], count


def _llama_facts(asked: Asked, engine: Any, made: list[One]) -> dict[str, Any]:
    seed = getattr(engine, "_seed", None)
    facts: dict[str, Any] = {"seed.llama_cpp": seed, "seed.request": asked.arguments.get("seed")}
    if facts["seed.request"] is None:
        facts["seed.request"] = Field.unset("seed.request", "call")
    prompt = made[0].prompt_ids if made else None
    if asked.before is None:
        facts["llama_cpp.prefix_reuse"] = 0
    elif prompt is None:
        why = "the length of the prompt is not told"
        facts["llama_cpp.prefix_reuse"] = Field.unknown("llama_cpp.prefix_reuse", why)
    else:
        numpy = sys.modules["numpy"]
        most = min(len(prompt), len(asked.before))
        same = asked.before[:most] == numpy.asarray(prompt[:most])
        facts["llama_cpp.prefix_reuse"] = most if bool(same.all()) else int(same.argmin())
    return facts


ANSWERS: dict[str, Callable[[Asked, Any, Any], Iterable[One]]] = {
    "vllm": _objects, "tensorrt_llm": _objects, "sglang": _dicts, "llama_cpp": _choices,
}  # fmt: skip


def _seeds(asked: Asked) -> Any:
    params = asked.arguments.get("sampling_params")
    many = params if isinstance(params, (list, tuple)) else [params]
    seeds = [item.get("sampling_seed") if isinstance(item, Mapping) else getattr(item, "seed", None) for item in many]
    if all(seed is None for seed in seeds):
        return Field.unset("seed.request", "call")
    return seeds[0] if len(set(seeds)) == 1 else seeds


def _cached(asked: Asked, result: Any) -> Any:
    items = result if isinstance(result, (list, tuple)) else [result]
    if asked.runtime == "sglang":
        found = [(item.get("meta_info") or {}).get("cached_tokens") for item in items]
    else:
        found = [getattr(item, "num_cached_tokens", None) for item in items]
    if any(number is None for number in found) or not found:
        return Field.unknown("batch.prefix_cache_hit_tokens", "the engine does not say")
    return found
