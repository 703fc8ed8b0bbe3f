"""What counts as a secret, what is left of text that holds one, and that other text is left alone."""

import pytest

from provenance.integrity import secrets


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("https://me:pw@host/x", "https://[redacted]@host/x"),
        ("Authorization: Bearer abcdefgh12345", "Authorization: Bearer [redacted]"),
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
