"""What counts as a secret, what is left of text that holds one, and that other text is left alone."""

import base64
import json
import random
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provenance.catalogue.fields import table
from provenance.integrity import secrets, values

SECRET_NAMES = (
    "password", "PASSWORD", "PGPASSWORD", "db_password", "passphrase", "pwd", "secret", "client_secret", "clientSecret",
    "APIKey", "api-key", "X-Api-Key", "--api-key", "apikey", "access_key", "AWS_SECRET_ACCESS_KEY", "private.key", "token",
    "hf_token", "accessToken", "X-Auth-Token", "id_token", "auth", "hf_auth", "authorization", "Proxy-Authorization",
    "cookie", "Set-Cookie", "bearer", "credentials", "session", "session_id", "JSESSIONID", "sig", "X-Amz-Signature",
    "STRIPE_KEY", "SENTRY_DSN", "DATABASE_URL", "AZURE_STORAGE_ACCOUNT_KEY", "connection_string", "SMTP_PASS",
)  # fmt: skip
ORDINARY_NAMES = (
    "eos_token_id", "eos_token", "bos_token", "pad_token", "max_new_tokens", "tokens", "tokenizer", "token_ids", "token_type_ids",
    "next_token", "past_key_values", "num_key_value_heads", "key", "keys", "primary_key", "cache_key", "prompt_cache_key",
    "author", "authority", "authors", "KeyError", "monkey", "keyboard", "design", "signal", "passage", "forward_pass",
    "secretary", "token_healing", "_from_model_config", "password_length", "token_url", "InferenceSession",
    "PROVENANCE_KEY_FILE", "AuthError", "compass", "bypass", "key_padding_mask", "query_key", "decoder_start_token_id", "",
)  # fmt: skip
INNOCENT = (
    "eos_token_id=2", "max_new_tokens=12", "tokenizer: LlamaTokenizer", "token_ids: [1, 2]", "tokens: 12", "unexpected token: ;",
    "Unexpected token: 'foo'", "past_key_values: DynamicCache()", "past_key_values=None", "num_key_value_heads=8",
    "KeyError: 'x'", "KeyError: 'api_key'", "key: value", "key=value", "author: Ann Smith", "authority=local12",
    "`_from_model_config`", "tokens per second: 40",
    "The following `model_kwargs` are not used by the model: ['x'] (note: typos in the arguments also show up here)",
    "The following `model_kwargs` are not used: ['x']", "mat1 and mat2 shapes cannot be multiplied (1x4 and 5x6)",
    "size mismatch for lm_head.weight: copying a param with shape torch.Size([1, 2])", 'Missing key(s) in state_dict: "a.b"',
    "eos_token='<|endoftext|>'", '{"eos_token": "<|x|>", "max_tokens": 12}', '{"token": "Hello12", "logprob": -0.1}',
    '{"logprob": -0.1, "token": "Wor1d", "bytes": [1]}', '{"token": 573, "score": 0.1}', '{"token": [12, 15]}',
    "login(user, password)", "f(token: str, key: Optional[str], password: str)", "password=None", "use_auth_token=True",
    "TypeError: f() got an unexpected keyword argument 'password'", "InferenceSession: failed1 to load", "auth::login",
    "https://auth:8080/path", "cache_key='abc123'", "key_padding_mask=Mask12", "Enter password: ", "password: required",
    '{"properties":{"password":{"type":"string"}},"required":["api_key","query"]}', "signature: (x, y)", "sort key: name12",
    "tokenizer_config.json: missing1", "pad_token=<pad>", "next token: Hello12", "PWD=/home/ann/x", "the secret of it: all",
    '{"session": {"messages": ["hello there"]}}', "CUDA error: device-side assert triggered", "sequence_bias={(1,): -9.0}",
    "hashing_key=15485863", "expected scalar type Half but found Float", "secret=hmac:0123abcd", "password='[redacted]'",
)  # fmt: skip
PIECES = ("password", "token", "api_key", "cookie", "Authorization", "--api-key", "auth", "=", ":", " ", '"', "'", "\\", "{", "}",
          "[", "]", "(", ")", ",", ";", "&", "\n", "12", "abc", "Bearer ", "hmac:", "[redacted]")  # fmt: skip


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_a_secret_name(name: str) -> None:
    assert secrets.named(name)
    assert secrets.withheld(name, "plain text")
    assert not secrets.withheld(name, None)
    assert not secrets.withheld(name, True)
    if not name.startswith("--"):
        assert b"Plain7text" not in secrets.scrub(f"{name}='Plain7text'".encode())
        assert b"Plain7text" not in secrets.scrub(json.dumps({name: "Plain7text"}).encode())


@pytest.mark.parametrize("name", ORDINARY_NAMES)
def test_an_ordinary_name(name: str) -> None:
    assert not secrets.named(name)
    data = f"{name}=Plain7text {name}: Plain7text '{name}': 'Plain7text'".encode()
    assert secrets.scrub(data) is data


def test_no_field_of_the_catalogue_is_withheld_by_its_name_but_those_that_are_never_read() -> None:
    assert [name for name in table() if secrets.named(name)] == [
        "env.VLLM_API_KEY", "sglang.api_key", "sglang.admin_api_key",
    ]  # fmt: skip


@pytest.mark.parametrize("text", INNOCENT)
def test_innocent_text_stays_as_it_is(text: str) -> None:
    for data in (text.encode(), json.dumps([text]).encode(), values.encode({"args": [text, {"text": text}]})):
        assert secrets.scrub(data) is data


@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
@settings(max_examples=400, deadline=None)
def test_a_document_stays_a_document(text: str) -> None:
    for value in (
        {"a": [text, text]},
        {"password": text, "b": [text, {"token": text}]},
        {1: ("api_key", text), "auth": 12},
    ):
        left = values.decode(secrets.scrub(values.encode(value)))
        assert not isinstance(left, values.Cut)
    secrets.scrub(text.encode())


def test_numbers_beside_a_name_that_is_often_ordinary_stay_and_beside_a_password_do_not() -> None:
    assert secrets.scrub(b'{"token":12,"password":1234,"x":[1]}') == b'{"token":12,"password":"[redacted]","x":[1]}'


@pytest.mark.parametrize(
    "text", ["a_key" * 200_000, "-----BEGIN" * 100_000, "sk-" * 350_000, "://" + ":" * 1_000_000, "password='\n" * 80_000,
             "secret=(\n" * 100_000, '[1,"' + "password='" * 100_000 + '"]', "a.b-" * 250_000, "token: " * 50_000],
    ids=lambda text: text[:12],
)  # fmt: skip
def test_hostile_text_of_a_megabyte_comes_to_an_end(text: str) -> None:
    """Where the work grew with the square of the length, each of these would take hours."""
    assert len(secrets.scrub(text.encode())) > 0
    assert secrets.tells(text) in (True, False)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("https://me:pw@host/x", "https://[redacted]@host/x"),
        ("Authorization: Bearer abcdefgh12345", "Authorization: Bearer [redacted]"),
        ("Authorization: Token abc and more", "Authorization: Token [redacted] and more"),
        ("password='x y' and more", "password='[redacted]' and more"),
        ("--api-key abc --n 2", "--api-key [redacted] --n 2"),
        ("['--api-key', 'abc', '--n', '2']", "['--api-key', '[redacted]', '--n', '2']"),
        ("Cookie: sid=abc; b=2", "Cookie: [redacted]"),
        ("h/x?sig=abc123&b=1", "h/x?sig=[redacted]&b=1"),
        ("Server=h;pwd=ab,c;Uid=u", "Server=h;pwd=[redacted];Uid=u"),
        ('{"a": {"api_key": "x\\"y"}, "b": 1}', '{"a": {"api_key": "[redacted]"}, "b": 1}'),
        ('["{\\"api_key\\": \\"xyz\\", \\"b\\": 1}"]', '["{\\"api_key\\": \\"[redacted]\\", \\"b\\": 1}"]'),
        ('{"a": "Basic dXNlcjpwYXNz"}', '{"a": "Basic [redacted]"}'),
        ("-----BEGIN PRIVATE KEY-----\nabc\n-----END PRIVATE KEY-----\nrest", "[redacted]\nrest"),
        ("sk-proj-abcdefghijklmnop!", "[redacted]!"),
        ("https://h/x?api_key=abcd1234&b=1", "https://h/x?api_key=[redacted]&b=1"),
        ("host=h password=hunter22 user=u", "host=h password=[redacted] user=u"),
        ("https://host/path?q=1#a:b", "https://host/path?q=1#a:b"),
        ("max_tokens=123456 eos_token=<|x|>", "max_tokens=123456 eos_token=<|x|>"),
        ("mail me: ann@host.example", "mail me: ann@host.example"),
    ],
)
def test_text_without_its_secrets(text: str, left: str) -> None:
    assert secrets.scrub(text.encode()).decode() == left


def test_the_value_of_a_secret_variable_is_taken_out_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", 'without"form\\at all')
    assert secrets.scrub(b'x without"form\\at all y') == b"x [redacted] y"
    assert secrets.scrub(b'{"k": "without\\"form\\\\at all"}') == b'{"k": "[redacted]"}'
    monkeypatch.setenv("MY_API_KEY", "another one")
    assert secrets.scrub(b"another one") == b"[redacted]"


def test_short_and_numeric_values_are_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "a")
    monkeypatch.setenv("OTHER_TOKEN", "1234567890")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "falsehood")
    assert secrets.scrub(b"a banana 1234567890 falsehood") == b"a banana 1234567890 falsehood"


def test_what_holds_nothing_is_the_same_object() -> None:
    data = b'{"args": [1, 2, "three"]}'
    assert secrets.scrub(data) is data


@pytest.mark.parametrize(
    ("url", "left", "password"),
    [
        ("postgresql+psycopg://u:p%2Fq@h:1/d", "postgresql+psycopg://u@h:1/d", "p/q"),
        ("postgresql+psycopg://h/d?password=x&sslmode=require", "postgresql+psycopg://h/d?sslmode=require", "x"),
        ("postgresql+psycopg://h/d?sslmode=require&password=x", "postgresql+psycopg://h/d?sslmode=require", "x"),
        ("postgresql+psycopg://u@h/d", "postgresql+psycopg://u@h/d", ""),
        ("sqlite:////a:b@c/p.db", "sqlite:////a:b@c/p.db", ""),
    ],
)
def test_a_password_is_split_from_its_url(url: str, left: str, password: str) -> None:
    assert secrets.without_password(url) == (left, password)


@pytest.mark.parametrize(
    "value",
    ["bfloat16", "/usr/bin", "localhost", "production", "localhost:8080", "us-east-1", "~/models/a-b", "db.example.com:5432",
     "https://auth.example.com/path", "flash_attention_2", "1234567890", "meta-llama", "sqlite:////home/me/p.db"],
)  # fmt: skip
def test_an_ordinary_value_of_a_secret_variable_stays_in_other_texts(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("MY_SECRET", value)
    assert value.encode() in secrets.scrub(f"it ran with {value} today".encode())


@pytest.mark.parametrize(
    "value",
    ["hunter2hunter2", "correcthorsebattery9", "correct horse battery", "correct-horse-battery-staple", "Sommer2024", "p@ss/w0rd",
     "AbCdEfGh", "0f8fad5bd9cb469f", "/8fHs7Gh2AbCdEfGhIjKl/x", "qwertyuiopasdfghjkl"],
)  # fmt: skip
def test_a_secret_of_a_variable_leaves_every_text(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MY_SECRET", value)
    from urllib.parse import quote

    for text in (f"it ran with {value} today", f"https://host/{quote(value, safe='')}/x", json.dumps([f"x{value}y"])):
        left = secrets.scrub(text.encode())
        assert b"[redacted]" in left
        assert value.encode() not in left


def test_a_password_in_the_url_of_any_variable_leaves_every_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE", "postgresql://me:hunter2hunter2@host/db")
    assert secrets.scrub(b"failed for hunter2hunter2") == b"failed for [redacted]"


def test_a_value_with_many_dashes_is_judged_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", "-" * 5000 + "!")
    assert secrets.scrub(b"nothing") == b"nothing"


@pytest.mark.parametrize(
    ("name", "secret"),
    [("cookie_recipe", False), ("cookies_eaten", False), ("cookie_jar", True), ("cookie", True), ("Set-Cookie", True),
     ("cookie_secret", True), ("session_cookie", True), ("secret_phrase", True), ("pw", True), ("conv_pw", False)],
)  # fmt: skip
def test_a_cookie_that_stands_first_decides_by_what_follows(name: str, secret: bool) -> None:
    assert secrets.named(name) == secret


@pytest.mark.parametrize(
    "text",
    ["basic understanding", "digest mismatch", "the digest sha256:00ff00ff00ff", "Unexpected token abcdefghijklmnopq",
     '["api_key", "query"]', "['password', 'username']", "https://ann@host/x", "ssh://git@host/x", "pypi-attestations",
     "pass: prefill", '{"pass": "prefill"}', "?page=12&next_token=abcd", "key -> value", "f(token) -> str", "hf_hub_enable_transfer",
     '{"name": "temperature", "value": 0.5}', '{"name": "eos_token", "value": "hello12"}', "<b>token</b>", "<tokens>12 34</tokens>",
     "asiapacificregions", "cookie_recipe='two eggs'", "npm_config_registry_url", "forward_pass=first1"],
)  # fmt: skip
def test_more_innocent_text_stays_as_it_is(text: str) -> None:
    for data in (text.encode(), json.dumps([text]).encode(), values.encode({"args": [text]})):
        assert secrets.scrub(data) is data


@pytest.mark.parametrize(
    "text", ["<password>" * 100_000, '"name": "api_key", ' * 50_000, '"value": "x", ' * 70_000, "://a1" * 200_000, "://" + "a1" * 500_000,
             "password -> " * 80_000, "password%3D" * 90_000, "bearer " * 140_000, "token provided " * 60_000, "password" + "\\" * 1_000_000,
             "password" + "\u00a0" * 300_000, '["api_key","x12345678"],' * 40_000, "sk-a-" * 200_000, "&key=" * 200_000,
             "</<token>" * 100_000],
    ids=lambda text: text[:12],
)  # fmt: skip
def test_more_hostile_text_comes_to_an_end(text: str) -> None:
    assert len(secrets.scrub(text.encode())) > 0


def test_bytes_that_are_text_are_looked_into() -> None:
    value = {"body": b"password=hunter2x", "other": bytearray(b"api_key: abc12345"), "plain": b"\xff\x00"}
    left = values.decode(secrets.unsaid(value))
    assert left == {"body": b"password=[redacted]", "other": bytearray(b"api_key: [redacted]"), "plain": b"\xff\x00"}
    assert secrets.holds(value)
    assert not secrets.holds([b"plain"])


def _drawn(count: int, alphabet: str = string.ascii_letters + string.digits, seed: int = 4) -> str:
    """Draw letters: none of these is anybody's."""
    return "".join(random.Random(seed + count).choices(alphabet, k=count))


HEX, UPPER, WEB = (
    "0123456789abcdef",
    string.ascii_uppercase + string.digits,
    string.ascii_letters + string.digits + "-_",
)
TOKENS = {
    "sk-ant-api03-": "abcDEF-123456_ghijKLMN", "sk-proj-": _drawn(120, WEB), "glpat-": _drawn(20, WEB), "xoxb-": f"1234567890-{_drawn(24)}",
    "714582936:": "AA" + _drawn(33, WEB), "https://hooks.slack.com/services/": f"T0{_drawn(8, UPPER)}/B0{_drawn(8, UPPER)}/{_drawn(24)}",
    "https://outlook.office.com/webhook/": _drawn(30), "https://x.webhook.office.com/webhookb2/": "0a1b2c3d-0a1b-4c2d-8e3f-0a1b2c3d4e5f@x",
    "https://discord.com/api/webhooks/": f"1234567890/{_drawn(68, WEB)}", "dapi": _drawn(32, HEX), "dp.st.": f"prd.{_drawn(40)}",
    "dp.pt.": _drawn(43), "dckr_pat_": _drawn(27, WEB), "ATATT3": f"xFfGF0{_drawn(180, WEB)}=1A2B3C4D", "SK": _drawn(32, HEX),
    "AC": _drawn(32, HEX), "sntrys_": _drawn(60), "sntryu_": _drawn(64, HEX), "PMAK-": f"{_drawn(24, HEX)}-{_drawn(34, HEX)}",
    "tskey-": f"auth-{_drawn(17)}-{_drawn(32)}", "ntn_": _drawn(46), "secret_": _drawn(43), "figd_": _drawn(40, WEB),
    "pat": f"{_drawn(14)}.{_drawn(64, HEX)}", "glsa_": f"{_drawn(32)}_{_drawn(8, HEX)}", "glc_": f"eyJ{_drawn(60)}=",
    "lsv2_pt_": f"{_drawn(32, HEX)}_{_drawn(10, HEX)}", "lsv2_sk_": f"{_drawn(32, HEX)}_{_drawn(10, HEX)}",
    "pcsk_": f"{_drawn(6)}_{_drawn(60)}", "jina_": _drawn(60), "rpa_": _drawn(40, UPPER), "tgp_v1_": _drawn(43, WEB), "fw_": _drawn(24),
    "key-": _drawn(32, HEX), "ak-": _drawn(22), "as-": _drawn(22), "SG.": f"ab-{_drawn(19)}.{_drawn(43, WEB)}", "lin_api_": _drawn(40),
    "wandb_v1_": _drawn(60), "v1.0-": f"{_drawn(24)}-{_drawn(100)}", "nvapi-": f"ab-cd_{_drawn(58, WEB)}", "hf_": _drawn(34),
    "GOCSPX-": f"a-{_drawn(26, WEB)}", "AIza": f"Sy-{_drawn(32, WEB)}", "ya29.": f"a0-{_drawn(100, WEB)}",
}  # fmt: skip


@pytest.mark.parametrize("start", sorted(TOKENS))
def test_the_tokens_of_known_makers_go_wherever_they_stand(start: str) -> None:
    secret = TOKENS[start]
    for text in (
        f"called with {start}{secret}",
        f"'{start}{secret}'",
        f"first line\n{start}{secret}\nlast line",
        f"({start}{secret}, 12)",
    ):
        for data in (text.encode(), json.dumps([text, {"note": text}]).encode(), values.encode([text])):
            left = secrets.scrub(data)
            assert secret.encode() not in left, left
            assert secret[-12:].encode() not in left, left
            assert left.count(b"[redacted]") >= data.count(secret.encode())
        assert secrets.tells(text)
    large = b"some words 12. " * 100_000
    assert secret[-12:].encode() not in secrets.scrub_large(large + f"{start}{secret} ".encode() + large)


ORDINARY = (
    "fw_cfg", "fw_cfg_add_file", "rpa_tool", "rpa_framework_main==28.1.0", "jina_embeddings_v2_base_en-12", "jina_clip_v1", "pat_matching.py",
    "ntn_" + "a" * 50, "pattern.0a1b2c3d", "patterns12345678.txt", "key-12", "key-value-store-2024-10-11", "as-is", "ak-47", "as-2024-10-11-report-final-v2",
    "secret_santa", "secret_manager_v1", "figd_", "glc_matrix_4x4", "glsa_", "dapi", "dapi_server_2024", "SKU0123456789abcdef", "ACK 0123456789abcdef",
    "commit 967fd84c0ffee967fd84c0ffee967fd84c0ffee1", "fw_967fd84c0ffee967fd84c0ffee967fd84c0ffee1", "jina_967fd84c0ffee967fd84c0ffee967fd84c0ffee1",
    "d41d8cd98f00b204e9800998ecf8427e", "1b4e28ba-2fa1-11d2-883f-0016d3cca427", "model-00001-of-00003.safetensors", "v1.0-rc1", "v1.0-20241011",
    "sha256:" + "0a" * 32, "https://discord.com/channels/1234567890/1234567890123456789", "https://slack.com/help/articles/115005265703",
    "https://hooks.slack.com/services/", "12345678:AB", "2024-10-11T12:13:14Z", "task-12345678901234567890", "tskey", "mask-1", "SG.", "SG.abc.def",
    "discord.com/api/webhooks/", "nvidia_cublas_cu12-12.4.5.8-py3-none-manylinux2014_x86_64.whl", "Qwen2.5-Coder-32B-Instruct-GPTQ-Int4",
    "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl", "AC0123456789abcdef0123456789abcdef0123456789abcdef",
)  # fmt: skip


@pytest.mark.parametrize("text", ORDINARY)
def test_names_that_begin_like_tokens_stay(text: str) -> None:
    for data in (text.encode(), json.dumps([f"x {text} y", {"note": text}]).encode()):
        assert secrets.scrub(data) is data


def test_drawn_bytes_in_base64_stay_as_they_are() -> None:
    for seed in range(8):
        data = random.Random(seed).randbytes(200_000)
        for form in (base64.b64encode(data), data.hex().encode()):
            assert secrets.scrub(form) is form


@pytest.mark.parametrize("text", ["A1" * 500_000, "glpat-" * 170_000, ":A" * 500_000, "hooks.slack.com/services/" * 40_000, "fw_A1a" * 160_000,
                                  "pat" + "A1" * 500_000, ("a1" * 12 + " ") * 40_000, "12345678:" * 110_000], ids=lambda text: text[:9])  # fmt: skip
def test_hostile_runs_of_a_megabyte_come_to_an_end(text: str) -> None:
    """Where the work grew with the square of the length, each of these would take hours."""
    assert len(secrets.scrub(text.encode())) > 0
