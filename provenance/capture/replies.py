"""What a remote service was asked and what it replied, from the requests and answers of the `openai` client.

An allow-list says which parameters are written; content is payload; all other parameters are one keyed digest. Ids that
a service draws anew for each answer are left out of what is compared: they would part every two equal answers.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from provenance.capture.answers import Answer, finish_of, sealed
from provenance.facts import BUFFER, FINISHES, ROLE, TEXT, VALUE, Field, Payload, SequenceEnd, State
from provenance.fingerprint.engines import shown
from provenance.integrity import buffers, digests
from provenance.integrity.secrets import holds
from provenance.integrity.values import encode

CONTENT = ("messages", "input", "prompt", "instructions", "suffix", "tools", "functions", "prediction")
WRITTEN = (
    "model", "seed", "temperature", "top_p", "reasoning_effort", "verbosity", "max_completion_tokens", "max_tokens",
    "max_output_tokens", "stop", "logit_bias", "n", "parallel_tool_calls", "prompt_cache_retention", "service_tier",
    "truncation", "best_of", "logprobs", "top_logprobs", "stream",
)  # fmt: skip
SEALED = ("response_format", "tool_choice", "prediction", "prompt_cache_key", "web_search_options")
NEVER = {"extra_headers", "extra_query", "timeout", "user", "safety_identifier", "metadata", "store", "stream_options",
         "previous_response_id", "extra_body", "frequency_penalty", "presence_penalty", "reasoning"}  # fmt: skip
ABSENT = {"NotGiven", "Omit"}
DRAWN = {"id", "call_id", "item_id", "index", "status", "logprobs", "role", "encrypted_content"}
HIDDEN = "the weights of a remote service cannot be seen"
UNKNOWN, CUT, LENGTH, EOS = (FINISHES.index(name) for name in ("unknown", "cut", "length", "eos"))


class Asked(NamedTuple):
    """What a request said."""

    form: str  # chat, completion or response
    rows: int
    payloads: tuple[Payload, ...]
    facts: dict[str, Any]
    settings: list[Field]
    stops: bool
    sampled: bool


# -- the request ------------------------------------------------------------------------------------


def ask(form: str, request: Mapping[str, Any], key: bytes) -> Asked:
    """Read the parameters of a request before it is sent."""
    given = {name: value for name, value in request.items() if type(value).__name__ not in ABSENT}
    content = {name: given[name] for name in CONTENT if given.get(name) is not None}
    prompts = _prompts(content.pop("prompt", None)) if form == "completion" else [None]
    payloads: list[Payload] = []
    for row, prompt in enumerate(prompts):
        ids = isinstance(prompt, (list, tuple))
        if ids:
            payloads.append(Payload(ROLE["prompt.ids"], BUFFER, buffers.ids(prompt), row))
        rest = {**content, "prompt": prompt} if prompt is not None and not ids else content
        if rest:
            payloads.append(Payload(ROLE["arguments"], VALUE, encode(rest), row))
        if isinstance(prompt, str):
            payloads.append(Payload(ROLE["prompt.text"], TEXT, prompt.encode("utf-8", "surrogatepass"), row))
    facts: dict[str, Any] = {
        "batch.dynamic": True, "batch.size": Field.unknown("batch.size", "the service chooses the batch"),
        "seed.request": given["seed"] if given.get("seed") is not None else Field.unset("seed.request", "call"),
    }  # fmt: skip
    tools = given.get("tools") or given.get("functions")
    if tools:
        facts["input.tools_digest"] = sealed(key, "tools", tools)
    fields = _settings(given, key)
    heat = given.get("temperature")
    return Asked(form, len(prompts), tuple(payloads), facts, fields, bool(given.get("stop")), heat != 0)


def _prompts(prompt: Any) -> list[Any]:
    if not isinstance(prompt, (list, tuple)) or not prompt or all(type(item) is int for item in prompt):
        return [prompt]
    return list(prompt)


def _settings(given: Mapping[str, Any], key: bytes) -> list[Field]:
    fields = []
    for name in WRITTEN:
        fields.append(_written(f"service.request.{name}", given.get(name)))
    for name in SEALED:
        value = given.get(name)
        field = f"service.request.{name}"
        fields.append(
            Field.unset(field, "call") if value is None else Field(field, sealed(key, name, value), source="call")
        )
    penalties = {name: given[name] for name in ("frequency_penalty", "presence_penalty") if given.get(name) is not None}
    fields.append(_written("service.request.penalties", penalties or None))
    reasoning = given.get("reasoning")
    if isinstance(reasoning, Mapping) and reasoning.get("effort") and given.get("reasoning_effort") is None:
        fields.append(_written("service.request.reasoning_effort", reasoning["effort"]))
    previous = given.get("previous_response_id")
    fields.append(_written("service.previous_response_id", previous))
    return [*fields, *_more(given, key), *_mode(given)]


def _written(field: str, value: Any) -> Field:
    if value is None:
        return Field.unset(field, "call")
    plain = shown(value)
    if holds(plain):
        return Field.secret(field, "call")
    return Field(field, plain, State.VALUE, "", "call")


def _more(given: Mapping[str, Any], key: bytes) -> list[Field]:
    """Digest what no list names; of the extra body write numbers and switches: other servers sample by them."""
    known = {*CONTENT, *WRITTEN, *SEALED, *NEVER}
    more = {name: value for name, value in given.items() if name not in known}
    body = given.get("extra_body")
    fields = []
    if isinstance(body, Mapping):
        for name, value in sorted((str(name), value) for name, value in body.items()):
            if isinstance(value, (bool, int, float)) and name.isascii() and name.isidentifier():
                fields.append(Field(f"service.request.extra.{name}", value, source="call"))
            else:
                more[f"extra_body.{name}"] = value
    field = "service.request.more_digest"
    fields.append(Field(field, sealed(key, "more", more), source="call") if more else Field.unset(field, "call"))
    return fields


def _mode(given: Mapping[str, Any]) -> list[Field]:
    heat = given.get("temperature")
    if isinstance(heat, (int, float)):
        return [Field("generation.do_sample", heat > 0, source="derived")]
    return [Field.unknown("generation.do_sample", "no temperature was given; the service's default is not seen")]


def service(client: Any, request: Mapping[str, Any], key: bytes) -> list[Field]:
    """Say which service and which model was asked: the address as a keyed digest, without credentials or query."""
    found = [Field("engine.name", "remote", source="call")]
    try:
        url = client.base_url
        place = f"{url.host}:{url.port or ''}{url.path}"
        digest = "hmac:" + digests.equality(key, "endpoint", (place.encode("utf-8", "surrogatepass"),)).hex()
        found.append(Field("service.base_url_digest", digest, source="client"))
    except Exception as error:
        found.append(Field.unknown("service.base_url_digest", f"{type(error).__name__}: the client does not say"))
    model = request.get("model")
    found.append(Field("model.name_or_path", model, source="call") if isinstance(model, str) else _no_model())
    return found


def _no_model() -> Field:
    return Field.unset("model.name_or_path", "call")


# -- the reply --------------------------------------------------------------------------------------


def plain(result: Any) -> dict[str, Any] | None:
    """Return an answer as plain values; None for one that has no such form."""
    dump = getattr(result, "model_dump", None)
    document = dump(warnings=False) if callable(dump) else result
    return document if isinstance(document, dict) else None


def raw_document(response: Any) -> dict[str, Any] | None:
    """Return the JSON of a raw response that has been read; None where the caller reads it."""
    try:
        document = response.json()
    except Exception:  # not read yet, or no JSON
        return None
    return document if isinstance(document, dict) else None


def head_of(response: Any, raw: Any) -> dict[str, Any]:
    """Take the request id from the headers, and how often a raw response was asked for again; no other header."""
    return {"request_id": response.headers.get("x-request-id"), "retries": getattr(raw, "retries_taken", None)}


def read(asked: Asked, document: dict[str, Any] | None, head: Mapping[str, Any]) -> Answer:
    """Read an answer. Without one, say that it was not seen."""
    facts: dict[str, Any] = {
        "evidence": "a remote service gives no logits",
        "weights.loaded_root": Field.unknown("weights.loaded_root", HIDDEN),
        "service.client_retries": _or_unknown("service.client_retries", head.get("retries"), "the client does not say"),
    }
    if head.get("request_id"):
        facts["service.response.request_id"] = str(head["request_id"])
    if document is None:
        rows = tuple(SequenceEnd(row, 0, 0, 0, 0, UNKNOWN, math.nan, 0) for row in range(asked.rows))
        return Answer(rows, (), {**facts, "output": "not decoded: the caller reads the response itself"})
    usage = document.get("usage") or {}
    facts |= _facts(document, usage)
    if asked.form == "response":
        ends, payloads = _response(document, usage)
    else:
        ends, payloads = _choices(asked, document, usage)
        reasons = [choice.get("finish_reason") for choice in document.get("choices") or ()]
        facts["service.response.finish_reason"] = reasons[0] if len(reasons) == 1 else reasons
    return Answer(tuple(ends), tuple(payloads), facts)


def _or_unknown(name: str, value: Any, why: str) -> Any:
    return value if value is not None else Field.unknown(name, why)


def _facts(document: Mapping[str, Any], usage: Mapping[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for name in ("model", "system_fingerprint", "service_tier"):
        field = f"service.response.{name}"
        facts[field] = _or_unknown(field, document.get(name), "the service gave none")
    for name in ("id", "created", "status"):
        value = document.get(name, document.get("created_at") if name == "created" else None)
        if value is not None:
            facts[f"service.response.{name}"] = value
    read_in = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    made = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
    field = "service.response.cached_tokens"
    facts[field] = _or_unknown(field, read_in.get("cached_tokens"), "the service does not say")
    for name in ("reasoning_tokens", "accepted_prediction_tokens"):
        if made.get(name) is not None:
            facts[f"service.response.{name}"] = made[name]
    for name, count in zip(("prompt_tokens", "completion_tokens"), _counts(usage), strict=True):
        if count is not None:
            facts[f"service.response.{name}"] = count
    return facts


def _counts(usage: Mapping[str, Any]) -> tuple[int | None, int | None]:
    return (
        usage.get("prompt_tokens", usage.get("input_tokens")),
        usage.get("completion_tokens", usage.get("output_tokens")),
    )


def _choices(asked: Asked, document: Mapping[str, Any], usage: Mapping[str, Any]) -> tuple[list[Any], list[Payload]]:
    choices = document.get("choices") or []
    each = max(1, len(choices) // max(1, asked.rows))
    n_in, n_out = _counts(usage)
    ends, payloads = [], []
    for place, choice in enumerate(choices):
        row, ret = divmod(int(choice.get("index", place) or 0), each)
        message = choice.get("message") or {"content": choice.get("text")}
        finish = finish_of(choice.get("finish_reason"))
        if choice.get("finish_reason") == "stop" and asked.stops:
            finish = UNKNOWN  # an end token or a stop string: the service says one word for both
        alone = len(choices) == 1  # usage counts them together
        ids = choice.get("token_ids")
        count = len(ids) if ids else int(n_out or 0) if alone else 0
        ends.append(SequenceEnd(row, ret, int(n_in or 0) if asked.rows == 1 else 0, count, 0, finish, math.nan, 0))
        payloads += _output(row, ret, message.get("content"), message, choice.get("logprobs"), ids)
    return ends, payloads


def _response(document: Mapping[str, Any], usage: Mapping[str, Any]) -> tuple[list[Any], list[Payload]]:
    n_in, n_out = _counts(usage)
    output = document.get("output") or []
    parts = [part for item in output for part in item.get("content") or () if part.get("type") == "output_text"]
    text = "".join(part.get("text") or "" for part in parts)
    logprobs = [part["logprobs"] for part in parts if part.get("logprobs")]
    why = (document.get("incomplete_details") or {}).get("reason")
    finish = {"max_output_tokens": LENGTH, "content_filter": CUT}.get(str(why), UNKNOWN)
    finish = EOS if document.get("status") == "completed" else finish
    end = SequenceEnd(0, 0, int(n_in or 0), int(n_out or 0), 0, finish, math.nan, 0)
    return [end], list(_output(0, 0, text if parts else None, {"output": output}, logprobs or None, None))


def _output(row: int, ret: int, text: Any, value: Any, logprobs: Any, ids: Any) -> list[Payload]:
    found = []
    if ids:  # of servers that return the tokens themselves
        found.append(Payload(ROLE["output.ids"], BUFFER, buffers.ids(ids), row, ret))
    else:
        found.append(Payload(ROLE["output.value"], VALUE, encode(lasting(value)), row, ret))
    if isinstance(text, str):
        found.append(Payload(ROLE["output.text"], TEXT, text.encode("utf-8", "surrogatepass"), row, ret))
    if logprobs:
        found.append(Payload(ROLE["evidence.logprobs"], VALUE, encode(logprobs), row, ret))
    return found


def lasting(value: Any) -> Any:
    """Return what of an answer can be compared: without ids drawn for it, and without what is empty.

    >>> lasting({"id": "call_7", "function": {"name": "f", "arguments": "{}"}, "refusal": None, "annotations": []})
    {'function': {'name': 'f', 'arguments': '{}'}}
    """
    if isinstance(value, Mapping):
        kept = {name: lasting(item) for name, item in value.items() if name not in DRAWN}
        return {name: item for name, item in kept.items() if item is not None and item not in ([], {})}
    return [lasting(item) for item in value] if isinstance(value, (list, tuple)) else value


class Gathered:
    """A streamed answer put together, in the form of one that came whole."""

    def __init__(self, form: str) -> None:
        self.form = form
        self.whole: dict[str, Any] = {}
        self.choices: dict[int, dict[str, Any]] = {}
        self.texts: dict[int, list[str]] = {}
        self.final: Any = None

    def add(self, item: Any) -> None:
        """Take one piece."""
        if self.form == "response":
            self._event(item)
            return
        for name in ("id", "created", "model", "system_fingerprint", "service_tier"):
            value = getattr(item, name, None)
            if value is not None:
                self.whole[name] = value
        if getattr(item, "usage", None) is not None:
            self.whole["usage"] = plain(item.usage)
        for choice in getattr(item, "choices", None) or ():
            self._choice(choice)

    def _event(self, item: Any) -> None:
        kind = getattr(item, "type", "")
        if kind == "response.output_text.delta":
            self.texts.setdefault(0, []).append(item.delta)
        response = getattr(item, "response", None)
        if response is not None:
            self.final = response
            self.whole["ended"] = kind in ("response.completed", "response.incomplete", "response.failed")

    def _choice(self, choice: Any) -> None:
        index = int(getattr(choice, "index", 0) or 0)
        kept = self.choices.setdefault(index, {"index": index, "message": {}, "finish_reason": None})
        if choice.finish_reason is not None:
            kept["finish_reason"] = choice.finish_reason
        logprobs = plain(getattr(choice, "logprobs", None)) or {}
        for name, values in logprobs.items():
            if isinstance(values, list):
                kept.setdefault("logprobs", {}).setdefault(name, []).extend(values)
        delta = getattr(choice, "delta", None)
        text = getattr(choice, "text", None) if delta is None else getattr(delta, "content", None)
        if text:
            self.texts.setdefault(index, []).append(text)
        for name in ("refusal", "function_call"):
            if getattr(delta, name, None):
                _join(kept["message"], name, getattr(delta, name))
        for call in getattr(delta, "tool_calls", None) or ():
            calls = kept["message"].setdefault("tool_calls", {})
            one = calls.setdefault(call.index, {"type": "function", "function": {"name": "", "arguments": ""}})
            if call.function is not None:
                one["function"]["name"] += call.function.name or ""
                one["function"]["arguments"] += call.function.arguments or ""

    def complete(self) -> bool:
        """Say whether the answer was whole, though its stream was not read to the end."""
        if self.form == "response":
            return bool(self.whole.get("ended"))
        return bool(self.choices) and all(item["finish_reason"] is not None for item in self.choices.values())

    def document(self) -> dict[str, Any] | None:
        """Return what has come, or None where nothing has."""
        if self.form == "response":
            return self._response()
        if not self.whole and not self.choices:
            return None
        choices = []
        for index in sorted(self.choices):
            kept = dict(self.choices[index])
            message = dict(kept["message"])
            if index in self.texts:
                message["content"] = "".join(self.texts[index])
            if "tool_calls" in message:
                message["tool_calls"] = [call for _, call in sorted(message["tool_calls"].items())]
            choices.append({**kept, "message": message})
        return {**self.whole, "choices": choices}

    def _response(self) -> dict[str, Any] | None:
        document = plain(self.final) if self.final is not None else None
        if document is None or self.whole.get("ended"):
            return document
        text = "".join(self.texts.get(0, ()))
        part = {"type": "message", "content": [{"type": "output_text", "text": text}]}
        return {**document, "output": [part] if text else []}


def _join(message: dict[str, Any], name: str, piece: Any) -> None:
    """Add a piece of a refusal, or of a function call of the old kind."""
    if isinstance(piece, str):
        message[name] = message.get(name, "") + piece
        return
    kept = message.setdefault(name, {"name": "", "arguments": ""})
    kept["name"] += piece.name or ""
    kept["arguments"] += piece.arguments or ""
