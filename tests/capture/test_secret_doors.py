"""The doors by which a secret could come in: labels, reasons, pairs of names and values, sentences of errors, collectors.

Each secret is a text of its own, looked for in every byte of the spool, of the database and of what commands print.
"""

import json
import os
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, Command

# What errors say. Every {} is another secret.
SENTENCES = (
    "https://{}@host/x", "https://me:{}@host/x?y=1", "https:/me:{}@host/x", "Incorrect api key provided: {}.",
    "Incorrect API key provided: {}", "https://h/x?key={}", "https://h/x?b=1&key={}", "https://h/x?token={}&b=1", "a&sig={}",
    "https://h/x?X-Amz-Signature={}", "pw={}", "pass={}", "Digest {}", "Bearer  {}", "Bearer\u00a0{}", "ApiKey {}", "password%3D{}",
    "a%3D1%26token%3D{}%26b", "<password>{}</password>", "<wsse:Password Type='x'>{}</wsse:Password>", "password -> {}",
    "password->{}", "password → {}", "password：{}", "password:\u00a0{}", "password\u00a0=\u00a0{}", "password\\xa0=\\xa0{}",
    "the password is '{}'", 'os.environ["API_KEY"] = "{}"', "&quot;password&quot;:&quot;{}&quot;", "%22password%22%3A%22{}%22",
    "password\\u003d{}", "Header(name='api_key', value='{}')", '<add key="password" value="{}"/>', "secret value: {}",
    "token provided: {}", "[('api_key', '{}')]", "['api_key', '{}']", '{{"key": "password", "value": "{}"}}',
    "postgresql://me:p@{}@host/db", "gsk_{}", "r8_{}", "sk_live_{}", "api_org_{}", "curl -H 'X-Api-Key: {}'", "a\nsecret:\n  {}",
    "password\t=\t{}", "client_secret = {}", "token='{}'", "SECRET: {}", "X-Auth-Token: {}", "{{'token': b'{}'}}",
)  # fmt: skip
PROGRAM = """
import json, sys
import provenance

secrets, sentences = json.loads(sys.argv[1]), json.loads(sys.argv[2])
give = iter(secrets).__next__

@provenance.record
def fails(text):
    raise ConnectionError(text)

@provenance.record
def keeps(value, cookie_recipe=None):
    return value

for text in sentences:
    try:
        fails(text)
    except ConnectionError:
        pass
    keeps([text, text.encode(), bytearray(text.encode())])

with provenance.run(name="password=" + give(), tags={"api_key": give(), "how": "Bearer " + give(), "pair": "hf_" + give()}) as block:
    block.tags["client_secret"] = give()
    block.tags["token=" + give()] = "x"
    block.tags["name"] = "pw=" + give()
    keeps(1)
    block.name = "secret: " + give()
    block.set_field("mine.pair", ("api_key", give()))
    block.set_field("mine.list", ["api_key", give()])
    block.set_field("mine.row", {"name": "api_key", "value": give()})
    block.set_field("mine.rows", [["password", give()]])
    block.set_field("mine.url", "https://h/x?key=" + give())
    try:
        block.set_field("mine.hf_" + give(), 1)
    except ValueError:
        pass
    keeps(2)

@provenance.record(name="job password=" + give())
def named():
    pass

named()
keeps({"name": "api_key", "value": give()})
keeps({"value": give(), "kind": "plain", "name": "api_key"})
keeps([{"key": "Authorization", "type": "text", "value": give()}])
keeps([("api_key", give()), ["password", give()], ["api_key", give()]])
keeps({1: 2, "api_key": give()})
keeps(json.dumps([{"name": "client_secret", "value": give()}]))
keeps(("x", {"cookies": {"sid": give()}}, {"headers": {"Cookie": "sid=" + give()}}))
keeps("ordinary text", cookie_recipe="two eggs and flour")
provenance.flush()
"""


def _spares() -> Iterator[str]:
    while True:
        yield f"Zq7{os.urandom(9).hex()}"


def _bytes(db: Path, home: Path) -> Iterator[tuple[str, bytes]]:
    for top in (home, db.parent):
        for path in top.rglob("*"):
            if path.is_file():
                yield str(path), path.read_bytes()
    with sqlite3.connect(f"file:{db}?mode=ro", uri=True) as connection:
        for (table,) in connection.execute("select name from sqlite_master where type in ('table', 'view')").fetchall():
            for row in connection.execute(f"select * from {table}"):
                yield table, repr(row).encode()


def _unfolded(data: bytes) -> bytes:
    """Return bytes with what JSON in them holds as base64."""
    import base64
    import re

    found = re.findall(rb'"v":\s?\\*"([A-Za-z0-9+/=]{8,})\\*"', data)
    return data + b"".join(base64.b64decode(item + b"==") for item in found)


def test_no_door_lets_a_secret_in(home: Path, db: Path, command: Command, tmp_path: Path) -> None:
    spares = _spares()
    said = [next(spares) for _ in SENTENCES]
    sentences = [form.format(secret) for form, secret in zip(SENTENCES, said, strict=True)]
    given = [next(spares) for _ in range(40)]
    name, *tags = [next(spares) for _ in range(5)]
    program = tmp_path / "app.py"
    program.write_text(PROGRAM)
    done = command(
        "run", "--name", f"nightly password={name}", "--tag", f"api_key={tags[0]}", "--tag", f"note=Bearer {tags[1]}",
        "--tag", f"where=hf_{tags[2]}", "--tag", f"url=https://h/x?token={tags[3]}", "--",
        sys.executable, str(program), json.dumps(given), json.dumps(sentences),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = [
        command(*words)
        for words in (["log", "--json", "-n", "500"], ["log"], ["show", "last", "--json"], ["show", "last"])
    ]
    assert len(json.loads(told[0].stdout)) > 100
    written = [*_bytes(db, home), *(("command", (item.stdout + item.stderr).encode()) for item in told)]
    assert any(b"two eggs and flour" in data for _, data in written)
    assert any(b"ordinary text" in data for _, data in written)
    planted = {*said, *given, name, *tags}
    found = {(where, secret) for where, data in written for secret in planted if secret.encode() in _unfolded(data)}
    assert {
        next(s for s, x in zip(SENTENCES, said, strict=True) if x == secret) for _, secret in found if secret in said
    } == set()
    assert [given.index(secret) for _, secret in found if secret in given] == []
    assert found == set()


@pytest.mark.parametrize("writer", ["process"])
def test_labels_of_the_environment_are_scrubbed_again(python: Command, db: Path, writer: str) -> None:
    """Somebody else may have set what `provenance run` sets."""
    hook = ROOT / "provenance" / "cli" / "hook"
    environ = {
        **os.environ, "PYTHONPATH": f"{hook}{os.pathsep}{ROOT}", "PROVENANCE_RUN": "1", "PROVENANCE_WRITER": writer,
        "PROVENANCE_RUN_NAME": "password=Zq7a1b2c3d4", "PROVENANCE_RUN_TAGS": "api_key=Zq7a1b2c3d5\nsuite=nightly",
    }  # fmt: skip
    code = "import provenance\n@provenance.record\ndef f(): pass\nf(); provenance.flush()"
    assert python(code, env=environ).returncode == 0
    data = b"".join(path.read_bytes() for path in db.parent.rglob("*") if path.is_file())
    assert b"nightly" in data
    assert b"Zq7a1b2c3d4" not in data
    assert b"Zq7a1b2c3d5" not in data


def test_a_model_of_a_url_with_credentials_leaves_none_of_them_in_reasons(python: Command, db: Path) -> None:
    code = (
        "import sys, torch, provenance\nfrom transformers import AutoModelForCausalLM\n"
        "plain = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "for part in (plain.config, plain.generation_config):\n"
        "    part._name_or_path = 'https://u:Zq7first11@host/x?token=Zq7second22&key=Zq7third33'\n"
        "    part._commit_hash = None\n"
        "model = provenance.wrap(plain)\n"
        "model.generate(torch.tensor([[1, 2]]), max_new_tokens=1)\nprovenance.flush()"
    )
    done = python(code, str(ROOT / "provenance" / "data" / "tiny"))
    assert done.returncode == 0, done.stderr
    data = b"".join(path.read_bytes() for path in db.parent.rglob("*") if path.is_file())
    assert b"model.revision" in data
    for secret in (b"Zq7first11", b"Zq7second22", b"Zq7third33"):
        assert secret not in data


CALLS = """
import provenance

@provenance.record
def connect(password, text):
    return text

@provenance.record
def opened(text):
    return {"password": text}

connect("Zq7first11", "a")
connect("Zq7second22", "b")
opened("one")
opened("two")
connect("", "a")
connect("", "b")
provenance.flush()
"""


def test_calls_that_lost_a_secret_are_not_taken_for_equal(python: Command, command: Command) -> None:
    assert python(CALLS).returncode == 0
    told = json.loads(command("diff", "last~5", "last~4", "--json").stdout)
    assert told["inputs"]["equal"] is None
    assert told["verdict"] == "inconclusive"
    assert "input.arguments" in [item["field"] for item in told["unknown"]]
    text = command("diff", "last~5", "last~4")
    assert text.returncode == 3
    assert "a secret was taken out of the arguments" in text.stdout
    results = command("diff", "last~3", "last~2")
    assert json.loads(command("diff", "last~3", "last~2", "--json").stdout)["verdict"] != "same", results.stdout
    plain = json.loads(command("diff", "last~1", "last", "--json").stdout)
    assert plain["inputs"]["equal"] is False
