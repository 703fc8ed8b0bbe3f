"""The openai client under observation: the real client, against a real server on this machine that speaks the JSON."""

import asyncio
import gc
import importlib
import json
import threading
import types
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest

import provenance
from provenance import recorder as recorders
from provenance.facts import Run, State
from provenance.journal.spool import segments
from tests.fakes import models

KEY = "sk-test-abcdefghijklmnop1234"
USER = [{"role": "user", "content": "hi"}]
HEAD = {
    "id": "chatcmpl-1",
    "created": 1700000000,
    "model": "tiny-2026-01-01",
    "system_fingerprint": "fp_1",
    "service_tier": "default",
}
USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8, "prompt_tokens_details": {"cached_tokens": 2}}
CALL = {"id": "call_9", "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}}
OUTPUT = [{"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
           "content": [{"type": "output_text", "text": "hey you", "annotations": []}]}]  # fmt: skip
RESPONSE = {"id": "resp_1", "object": "response", "created_at": 1700000000, "model": "tiny-2026-01-01", "status": "completed",
            "output": OUTPUT, "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
            "usage": {"input_tokens": 5, "output_tokens": 2, "total_tokens": 7, "input_tokens_details": {"cached_tokens": 0},
                      "output_tokens_details": {"reasoning_tokens": 1}}}  # fmt: skip


class Service(BaseHTTPRequestHandler):
    """Answers as such a service does. The words of a message choose what kind of answer it is."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        """Answer one request."""
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        said = json.dumps(request)
        if "refuse" in said:
            key = self.headers["authorization"].removeprefix("Bearer ")
            return self._send(json.dumps({"error": {"message": f"Incorrect API key: {key}"}}).encode(), status=401)
        kind = "response" if "responses" in self.path else "chat" if "chat" in self.path else "text"
        if not request.get("stream"):
            return self._send(json.dumps(self._whole(kind, request, said)).encode())
        pieces = self._pieces(kind)
        if "break" in said:
            pieces = [*pieces[:2], {"error": {"message": "the fleet is tired"}}]
        body = "".join(
            f"event: {item['type']}\ndata: {json.dumps(item)}\n\n"
            if "type" in item
            else f"data: {json.dumps(item)}\n\n"
            for item in pieces
        )
        return self._send((body + ("" if kind == "response" else "data: [DONE]\n\n")).encode(), "text/event-stream")

    @staticmethod
    def _whole(kind: str, request: Any, said: str) -> Any:
        if kind == "response":
            return RESPONSE
        if kind == "text":
            many = (
                request["prompt"]
                if isinstance(request["prompt"], list) and isinstance(request["prompt"][0], str)
                else [0]
            )
            choices = [
                {"index": n, "text": f" t{n}", "finish_reason": "length", "logprobs": None} for n in range(len(many))
            ]
            return {**HEAD, "object": "text_completion", "choices": choices, "usage": USAGE}
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if "tool" in said else "hey you",
            "refusal": None,
        }
        message |= {"tool_calls": [CALL]} if "tool" in said else {}
        logprobs: dict[str, Any] = {
            "content": [{"token": "hey", "logprob": -0.1, "bytes": None, "top_logprobs": []}],
            "refusal": None,
        }
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "stop",
            "logprobs": logprobs if request.get("logprobs") else None,
        }
        return {**HEAD, "object": "chat.completion", "choices": [choice], "usage": USAGE}

    @staticmethod
    def _pieces(kind: str) -> list[Any]:
        if kind == "response":
            begun = {**RESPONSE, "status": "in_progress", "output": []}
            events: list[Any] = [{"type": "response.created", "response": begun}]
            events += [{"type": "response.output_text.delta", "delta": text, "item_id": "m", "output_index": 0, "content_index": 0, "logprobs": []} for text in ("hey", " you")]  # fmt: skip
            events += [{"type": "response.completed", "response": RESPONSE}]
            return [{**event, "sequence_number": n} for n, event in enumerate(events)]
        head = {**HEAD, "object": "chat.completion.chunk"}
        if kind == "text":
            return [
                {**head, "choices": [{"index": 0, "text": text, "finish_reason": why, "logprobs": None}]}
                for text, why in ((" t", None), ("0", "length"))
            ]
        deltas: list[Any] = [{"role": "assistant", "content": ""}, {"content": "hey"}, {"content": " you"}, {}]
        found: list[Any] = [
            {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None if delta else "stop"}]}
            for delta in deltas
        ]
        return [*found, {**head, "choices": [], "usage": USAGE}]

    def _send(self, body: bytes, kind: str = "application/json", status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.send_header("x-request-id", "req_77")
        self.send_header("set-cookie", "session=private")
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def client(address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("PROVENANCE_WRITER", "off")
    with openai.OpenAI(api_key=KEY, base_url=address, max_retries=0) as made:
        yield provenance.wrap(made)


def _only(db: Path) -> Run:
    (run,) = models.runs(db)
    return run


def _values(run: Run) -> dict[str, Any]:
    return {name: item.value for name, item in run.fields.items()}


# -- what is written down ---------------------------------------------------------------------------


def test_a_chat_completion_is_recorded_with_what_the_service_says_of_itself(client: Any, db: Path) -> None:
    answer = client.chat.completions.create(model="tiny", messages=USER, temperature=0, seed=3, logprobs=True, stop=["x"],
                                            response_format={"type": "text"}, extra_body={"top_k": 5, "note": "private"})  # fmt: skip
    assert type(answer).__name__ == "ChatCompletion"
    assert answer.choices[0].message.content == "hey you"
    run = _only(db)
    assert (run.runtime, run.operation, run.status) == ("openai", "chat.completions.create", "ok")
    (sequence,) = run.sequences
    assert sequence.input_value == {"messages": USER}
    assert (sequence.output_text, sequence.output_value) == ("hey you", {"content": "hey you"})
    assert sequence.finish == "unknown"  # an end token or the stop string: one word for both
    fields = _values(run)
    expected = {
        "service.request.model": "tiny", "service.request.temperature": 0, "service.request.seed": 3,
        "service.request.stop": ["x"], "service.request.extra.top_k": 5, "service.response.model": "tiny-2026-01-01",
        "service.response.system_fingerprint": "fp_1", "service.response.service_tier": "default",
        "service.response.finish_reason": "stop", "service.response.request_id": "req_77", "seed.request": 3,
        "service.response.cached_tokens": 2, "service.response.prompt_tokens": 5, "engine.name": "remote",
        "generation.do_sample": False, "model.name_or_path": "tiny",
    }  # fmt: skip
    assert {name: fields[name] for name in expected} == expected
    for name in ("service.request.response_format", "service.request.more_digest", "service.base_url_digest"):
        assert str(fields[name]).startswith("hmac:")
    assert run.fields["service.request.top_p"].state is State.UNSET
    assert run.fields["batch.size"].reason == "the service chooses the batch"
    assert run.fields["weights.loaded_root"].reason == "the weights of a remote service cannot be seen"


def test_neither_key_nor_header_nor_private_parameter_is_written(client: Any, db: Path) -> None:
    client.chat.completions.create(model="tiny", messages=USER, extra_headers={"x-mine": "hush-header"}, user="hush-user",
                                   extra_query={"q": "hush-query"}, extra_body={"password": "hush-body"})  # fmt: skip
    with pytest.raises(openai.AuthenticationError) as raised:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "refuse"}])
    assert KEY in str(raised.value)  # the service quotes it, and the caller sees what the service said
    answered, refused = models.runs(db)
    assert answered.status == "ok"
    assert (refused.status, "(secret)" in refused.error) == ("error", True)
    assert refused.fields["service.response.request_id"].value == "req_77"
    written = b"".join(path.read_bytes() for path in segments(db.with_name("p.db.spool")))
    assert b"chat.completions.create" in written
    for hidden in (KEY, "hush-", "session=private", "127.0.0.1"):
        assert hidden.encode() not in written, hidden


def test_a_streamed_answer_equals_one_that_came_whole(client: Any, db: Path) -> None:
    client.chat.completions.create(model="tiny", messages=USER)
    with client.chat.completions.create(model="tiny", messages=USER, stream=True) as stream:
        assert type(stream) is openai.Stream
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == "hey you"
    whole, streamed = models.runs(db)
    assert [run.status for run in (whole, streamed)] == ["ok", "ok"]
    assert whole.sequences[0].output_key == streamed.sequences[0].output_key
    assert streamed.sequences[0].finish == "eos"
    assert streamed.fields["service.response.system_fingerprint"].value == "fp_1"
    assert streamed.fields["service.response.request_id"].value == "req_77"
    assert streamed.fields["service.response.completion_tokens"].value == 3


def test_ids_that_are_drawn_for_each_answer_part_no_equal_answers(client: Any, db: Path) -> None:
    for number in (1, 2):
        CALL["id"] = f"call_{number}"
        client.chat.completions.create(
            model="tiny", messages=USER, tools=[{"type": "function", "function": {"name": "tool"}}]
        )
    one, two = models.runs(db)
    assert one.sequences[0].output_value == {"tool_calls": [{"type": "function", "function": CALL["function"]}]}
    assert one.sequences[0].output_key == two.sequences[0].output_key
    assert str(one.fields["input.tools_digest"].value).startswith("hmac:")


def test_completions_of_several_prompts_are_sequences_of_one_run(client: Any, db: Path) -> None:
    client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=2)
    client.completions.create(model="tiny", prompt=[5, 6])
    list(client.completions.create(model="tiny", prompt="a", stream=True))
    many, ids, streamed = models.runs(db)
    assert [(item.row, item.input_text, item.output_text) for item in many.sequences] == [
        (0, "a", " t0"),
        (1, "b", " t1"),
    ]
    assert many.sequences[0].finish == "length"
    assert ids.sequences[0].input_ids == (5, 6)
    assert streamed.sequences[0].output_text == " t0"


def test_responses_are_recorded_whole_and_streamed(client: Any, db: Path) -> None:
    client.responses.create(
        model="tiny", input="hi", instructions="be kind", max_output_tokens=9, reasoning={"effort": "low"}
    )
    kinds = [event.type for event in client.responses.create(model="tiny", input="hi", stream=True)]
    assert kinds[-1] == "response.completed"
    whole, streamed = models.runs(db)
    assert whole.operation == "responses.create"
    assert whole.sequences[0].input_value == {"input": "hi", "instructions": "be kind"}
    assert (whole.sequences[0].output_text, whole.sequences[0].finish) == ("hey you", "eos")
    assert whole.sequences[0].output_key == streamed.sequences[0].output_key
    assert whole.fields["service.request.reasoning_effort"].value == "low"
    assert whole.fields["service.response.status"].value == "completed"
    assert streamed.fields["service.response.reasoning_tokens"].value == 1


def test_a_raw_response_is_recorded_and_stays_the_callers(client: Any, db: Path) -> None:
    raw = client.chat.completions.with_raw_response.create(model="tiny", messages=USER)
    assert raw.parse().choices[0].message.content == "hey you"
    with client.chat.completions.with_streaming_response.create(model="tiny", messages=USER) as later:
        assert json.loads("".join(later.iter_text()))["model"] == "tiny-2026-01-01"
    first, second = models.runs(db)
    assert (first.sequences[0].output_text, first.fields["service.client_retries"].value) == ("hey you", 0)
    assert (second.status, second.sequences[0].output_text) == ("ok", None)


# -- streams that do not end ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "status", "text"),
    [
        ("closed", "abandoned", "hey"), ("dropped", "abandoned", "hey"), ("never read", "abandoned", None),
        ("read up to its last word", "ok", "hey you"), ("breaks", "error", "hey"),
    ],
)  # fmt: skip
def test_a_stream_that_is_not_read_to_its_end_says_how(
    how: str, status: str, text: str | None, client: Any, db: Path
) -> None:
    said = [{"role": "user", "content": "break" if how == "breaks" else "hi"}]
    stream = client.chat.completions.create(model="tiny", messages=said, stream=True)
    if how == "breaks":
        with pytest.raises(openai.APIError, match="the fleet is tired"):
            list(stream)
    elif how != "never read":
        for _ in range(4 if how.startswith("read") else 2):
            next(stream)
    if how in ("closed", "read up to its last word"):
        stream.close()
        assert stream.response.is_closed
    response = stream.response
    del stream
    gc.collect()
    response.close()
    run = _only(db)
    assert run.status == status
    assert (run.sequences[0].output_text if run.sequences else None) == text


def test_the_helpers_of_the_client_work_on_a_wrapped_stream(client: Any, db: Path) -> None:
    with client.chat.completions.stream(model="tiny", messages=USER) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.content == "hey you"
    assert "content.delta" in kinds
    assert _only(db).sequences[0].output_text == "hey you"


# -- async ------------------------------------------------------------------------------------------


def test_the_async_client_is_recorded_the_same_way(address: str, db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVENANCE_WRITER", "off")

    async def program() -> str:
        async with openai.AsyncOpenAI(api_key=KEY, base_url=address, max_retries=0) as made:
            client: Any = provenance.wrap(made)
            answer = await asyncio.create_task(client.chat.completions.create(model="tiny", messages=USER))
            stream = await client.chat.completions.create(model="tiny", messages=USER, stream=True)
            assert type(stream) is openai.AsyncStream
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
            early = await client.responses.create(model="tiny", input="hi", stream=True)
            await anext(early)
            await early.close()
            with pytest.raises(openai.AuthenticationError):
                await client.completions.create(model="tiny", prompt="refuse")
            assert answer.choices[0].message.content == text
            return text

    assert asyncio.run(program()) == "hey you"
    whole, streamed, early, refused = models.runs(db)
    assert [run.status for run in (whole, streamed, early, refused)] == ["ok", "ok", "abandoned", "error"]
    assert whole.sequences[0].output_key == streamed.sequences[0].output_key


# -- on and off -------------------------------------------------------------------------------------


def test_wrapping_twice_is_wrapping_once_and_uninstrument_takes_it_off(client: Any, db: Path) -> None:
    provenance.wrap(client)
    client.chat.completions.create(model="tiny", messages=USER)
    provenance.uninstrument(client)
    assert "create" not in vars(client.chat.completions)
    client.chat.completions.create(model="tiny", messages=USER)
    assert len(models.runs(db)) == 1


def test_an_answer_in_a_block_has_its_name_and_the_fields_of_the_caller(client: Any, db: Path) -> None:
    with provenance.run(name="nightly") as run:
        run.set_field("service.provider", "here")
        client.chat.completions.create(model="tiny", messages=USER)
    found = _only(db)
    assert (found.name, found.fields["service.provider"].value) == ("nightly", "here")


# -- never into the call ----------------------------------------------------------------------------

DOORS = {
    "services.wrap_client", "services.take_off", "services._kind", "services._resource", "services._sync", "services._async",
    "services.Tap.__iter__", "services.Tap.__next__", "services.Tap.__aiter__", "services.Tap.__anext__",
    "services.Tap.__getattr__", "services.Tap.__del__", "services.Watch.over", "services.Watch.saw",
}  # fmt: skip


def _failpoints() -> Iterator[tuple[str, Any, str]]:
    for room in ("services", "replies"):
        module = importlib.import_module(f"provenance.capture.{room}")
        for name, value in vars(module).items():
            if isinstance(value, types.FunctionType) and value.__module__ == module.__name__:
                yield f"{room}.{name}", module, name
            elif isinstance(value, type) and value.__module__ == module.__name__ and not issubclass(value, tuple):
                yield from (
                    (f"{room}.{name}.{inner}", value, inner) for inner in vars(value) if callable(vars(value)[inner])
                )


FAILPOINTS = [point for point in _failpoints() if point[0] not in DOORS]


def _program(client: Any) -> list[Any]:
    create: Callable[..., Any] = client.chat.completions.create
    seen = [
        create(model="tiny", messages=USER, tools=[{"type": "function"}], logprobs=True, extra_body={"top_k": 1}),
        create(messages=USER, model="tiny", stream=False), list(create(model="tiny", messages=USER, stream=True)),
        client.responses.create(model="tiny", input="hi"), list(client.responses.create(model="tiny", input="hi", stream=True)),
        client.completions.create(model="tiny", prompt="a"), client.completions.with_raw_response.create(model="tiny", prompt="a").text,
    ]  # fmt: skip
    early = create(model="tiny", messages=USER, stream=True)
    seen.append(next(early))
    early.close()
    early = client.responses.create(model="tiny", input="hi", stream=True)
    seen.append(next(early))
    early.close()
    with pytest.raises(openai.AuthenticationError):
        create(model="tiny", messages=[{"role": "user", "content": "refuse"}])
    return seen


NEVER = {"replies._join", "replies._no_model"}  # refusals; a request that names no model


@pytest.mark.parametrize(("name", "owner", "attribute"), FAILPOINTS, ids=[name for name, _, _ in FAILPOINTS])
def test_whatever_of_ours_breaks_the_client_does_not_notice(
    name: str, owner: Any, attribute: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROVENANCE_WRITER", "off")
    fired = []

    def broken(*arguments: Any, **options: Any) -> Any:
        fired.append(name)
        raise RuntimeError(name)

    with openai.OpenAI(api_key=KEY, base_url=address, max_retries=0) as bare:
        expected = _program(bare)
    with openai.OpenAI(api_key=KEY, base_url=address, max_retries=0) as made, monkeypatch.context() as patched:
        client = provenance.wrap(made)
        patched.setattr(owner, attribute, broken)
        assert repr(_program(client)) == repr(expected)
    assert fired or name in NEVER
    recorder = recorders._state["recorder"]
    assert recorder is not None
