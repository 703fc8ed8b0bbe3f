"""Sixty secrets are planted where real ones lie; not one is found in any byte that is written.

They stand in variables, arguments, a git remote, index URLs, data-source names, configuration and token files, tracebacks,
and in a copy of the environment among a call's arguments. The program is recorded from the outside and from the inside;
then every file below its home is read byte by byte, and everything that the commands print, in every form.
"""

import itertools
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, Command

PROGRAM = """
import os, sys
import torch, provenance
from transformers import AutoModelForCausalLM, AutoTokenizer

place, dsn, header = sys.argv[1:4]
tokenizer = AutoTokenizer.from_pretrained(place)
model = AutoModelForCausalLM.from_pretrained(place)
provenance.wrap(model, tokenizer=tokenizer)
with provenance.run(name="canary"):
    model.generate(**tokenizer("Once", return_tensors="pt"), max_new_tokens=2, do_sample=False, pad_token_id=0)

@provenance.record
def connect(url, environ, headers=None, fail=False):
    if fail:
        raise ConnectionError(f"cannot connect to {url} with {headers} and {dict(environ)!r}")
    return {"url": url, "headers": headers}

connect(dsn, dict(os.environ), headers={"Authorization": "Bearer " + header})
connect(dsn, repr(os.environ), headers=header)
try:
    connect(dsn, os.environ, {"Authorization": "Bearer " + header}, fail=True)
except ConnectionError:
    pass
try:
    model.generate(torch.tensor([[1]]), max_new_tokens=1, watermark_key=os.environ["APP_SECRET_KEY"] )
except Exception:
    pass
provenance.flush()
"""


@pytest.fixture
def secrets() -> Iterator[str]:
    """Give secrets that occur nowhere else, each of another look."""
    looks = (
        "hf_{0}",
        "sk-{0}",
        "sk-proj-{0}",
        "ghp_{0}",
        "glpat-{0}",
        "xoxb-{0}",
        "AKIA{0}",
        "plain{0}",
        "{0}==",
        "p_w-{0}",
    )
    return (
        looks[n % len(looks)].format(f"Canary{n:03d}{os.urandom(9).hex()}") for n in itertools.count()
    )  # fmt: skip


NAMES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID",
         "AWS_SESSION_TOKEN", "VLLM_API_KEY", "WANDB_API_KEY", "GITHUB_TOKEN", "GITLAB_TOKEN", "PGPASSWORD", "DB_PASSWORD",
         "MYSQL_PWD", "APP_SECRET_KEY", "JWT_SECRET", "COOKIE_SECRET", "SESSION_TOKEN", "SENTRY_AUTH_TOKEN", "SLACK_TOKEN",
         "NPM_TOKEN", "PYPI_PASSWORD", "AZURE_CLIENT_SECRET", "GOOGLE_API_KEY", "COHERE_API_KEY", "REPLICATE_API_TOKEN",
         "HTTP_AUTHORIZATION", "REDIS_PASSWORD", "GPG_PASSPHRASE", "PRIVATE_TOKEN",
         "CI_JOB_TOKEN", "DOCKER_AUTH_CONFIG")  # fmt: skip
URLS = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_INDEX_URL", "HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "DATABASE_URL",
        "SQLALCHEMY_DATABASE_URI", "CELERY_BROKER_URL", "MONGODB_URI", "XLA_FLAGS", "SENTRY_DSN")  # fmt: skip


def _plant(home: Path, secrets: Iterator[str]) -> tuple[dict[str, str], list[str], set[str], list[Path]]:
    """Plant them; return variables, arguments, the secrets, and the files in which they were put by us."""
    planted: list[str] = []

    def fresh() -> str:
        planted.append(next(secrets))
        return planted[-1]

    environ = {name: fresh() for name in NAMES}
    environ |= {name: f"https://user:{fresh()}@host.example/path" for name in URLS}
    arguments = [f"postgresql://app:{fresh()}@db.example/prod", fresh(), f"--api-key={fresh()}", "--password", fresh()]
    work = home / "work"
    files = {
        work / ".git" / "config": f'[remote "origin"]\n url = https://ann:{fresh()}@git.example/x.git\n[http]\n extraheader = Authorization: Basic {fresh()}\n',
        work / ".git" / "HEAD": "ref: refs/heads/main\n",
        work / ".git" / "refs" / "heads" / "main": "0" * 40 + "\n",
        home / ".cache" / "huggingface" / "token": fresh(),
        home / ".netrc": f"machine x login y password {fresh()}\n",
        home / ".config" / "pip" / "pip.conf": f"[global]\nindex-url = https://u:{fresh()}@index.example/simple\n",
        home / ".aws" / "credentials": f"[default]\naws_secret_access_key = {fresh()}\n",
        home / ".pypirc": f"[pypi]\npassword = {fresh()}\n",
        home / ".pgpass": f"*:*:*:*:{fresh()}\n",
        home / ".git-credentials": f"https://x:{fresh()}@git.example\n",
        home / ".docker" / "config.json": json.dumps({"auths": {"r": {"auth": fresh()}}}),
        home / ".ssh" / "id_ed25519": f"-----BEGIN OPENSSH PRIVATE KEY-----\n{fresh()}\n-----END OPENSSH PRIVATE KEY-----\n",
        work / ".env": f"SECRET={fresh()}\n",
        work / "config.toml": f'password = "{fresh()}"\n',
    }  # fmt: skip
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    environ["SSH_PRIVATE_KEY"] = files[home / ".ssh" / "id_ed25519"]
    return environ, arguments, set(planted), list(files)


def _written(home: Path, db: Path, planted_in: list[Path]) -> Iterator[tuple[str, bytes]]:
    """Yield every byte that was written: files as they are, and bodies as they read."""
    for top in (home, db.parent):
        for path in top.rglob("*"):
            if path.is_file() and path not in planted_in and path.name != "app.py":
                yield str(path), path.read_bytes()
    with sqlite3.connect(f"file:{db}?mode=ro", uri=True) as connection:
        for (table,) in connection.execute("select name from sqlite_master where type in ('table', 'view')").fetchall():
            for row in connection.execute(f"select * from {table}"):
                yield table, repr(row).encode()


def test_sixty_secrets_and_none_is_written(
    home: Path, db: Path, command: Command, secrets: Iterator[str], tmp_path: Path
) -> None:
    variables, arguments, planted, files = _plant(home, secrets)
    assert len(planted) >= 60
    program = home / "work" / "app.py"
    program.write_text(PROGRAM)
    environ = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, str(program), str(ROOT / "provenance" / "data" / "tiny"), *arguments],
        env=environ, cwd=program.parent, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [
        command(*words, env=environ, cwd=program.parent)
        for words in (
            ["log", "--json"], ["sql", "select * from run_overview"], ["env", "--json"], ["env", "--md"], ["env", "--all"],
            ["lock"], ["check"], ["show", "last", "--fields"], *(["show", f"last~{n}", "--json"] for n in range(5)),
            ["diff", "last~2", "last~3"],
        )
    ]  # fmt: skip
    assert len(json.loads(said[0].stdout)) == 5
    found = {
        (secret, where)
        for where, data in [*_written(home, db, files), *(("command", (s.stdout + s.stderr).encode()) for s in said)]
        for secret in planted
        if secret.encode() in data
    }
    assert found == set()


# -- by the name beside it ----------------------------------------------------------------------------

KEYWORDS = ("private_key", "passphrase", "access_key", "client_secret", "credentials", "cookie", "auth", "bearer", "pwd",
            "session", "hf_auth", "secret", "token", "authorization", "password", "api_key", "accessToken",
            "apikey", "refresh_token", "db_password", "ssh_key", "dsn")  # fmt: skip
SAID = (
    "AWS_SECRET_ACCESS_KEY={}", "access_token: {}", "token={}", 'auth_token="{}"', "'password': '{}'", '"api_key": "{}"',
    '\\"api_key\\": \\"{}\\"', "--password {}", "--api-key={}", "--api-key {}", "['--api-key', '{}']", '["--token","{}"]',
    "X-Api-Key: {}", "Cookie: a=1; sid={}; b=2", "Authorization: Token {}", "Authorization: {}",
    'Authorization: Digest username="me", response="{}"', "https://h/x?sig={}&b=1", "https://h/x?b=1&signature={}",
    "X-Amz-Signature={}", "secret: {}", "Server=h;Uid=u;pwd={};", "Set-Cookie: sid={}; Path=/", "Config(password='{}')",
    "Config(api_key={})", "auth=('me', '{}')", "cookies={{'a': '{}'}}", "[('Authorization', 'Token {}')]",
    "auth=HTTPBasicAuth('me', '{}')", "clientSecret : '{}'", "api key: {}", "invalid token: {}", "password=b'{}'",
    "pass\npassword={}\nmore", "token='{}", "secret={{'a': [1, '{}'", "AccountKey={};EndpointSuffix=h",
)  # fmt: skip
BESIDE = """
import json, sys
import torch, provenance

from transformers import AutoModelForCausalLM

keywords, said, place = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
plain = AutoModelForCausalLM.from_pretrained(place)
model = provenance.wrap(plain)
ids = torch.tensor([[1, 2]])

def tries(go, *args, **kwargs):
    try:
        go(*args, **kwargs)
    except Exception:
        pass

for name, value in keywords.items():
    tries(model.generate, ids, max_new_tokens=1, **{name: value})
    tries(model.generate, ids, max_new_tokens=1, options={"a": [{name: value}]})
    whole = name != "session"  # a session is looked into, name by name
    tries(model.generate, ids, max_new_tokens=1, **{name: {"a": [value]} if whole else value})
    tries(model.generate, ids, max_new_tokens=1, **{name: [value, value] if whole else value})
    space = {"record": provenance.record}
    exec(f"@record\\ndef by_name(x, {name}=None): return {{'{name}': {name}, 1: ({name!r}, 2)}}", space)
    tries(space["by_name"], 1, value)
    tries(space["by_name"], 1, **{name: value})
    tries(space["by_name"], {"a": {name: value}}, **{name: {"b": (1, value)} if whole else value})
    tries(space["by_name"], [({name: value, 3: 4},), f"Config({name}='{value}')"], value.encode())
    tries(space["by_name"], 1)
    with provenance.run(name="tagged", tags={name: value}) as block:
        tries(block.set_field, f"engine.{name}", value)
        tries(block.set_field, "engine.more", {name: value})
        tries(space["by_name"], 1)

@provenance.record
def fails(text):
    raise ConnectionError(text)

@provenance.record
def returns(text):
    return [text, {"text": text}, json.dumps({"inner": text})]

for text in said:
    tries(fails, text)
    tries(fails, "x" * 3990 + " " + text)
    tries(returns, text)
provenance.flush()
"""


def _planted(secrets: Iterator[str]) -> tuple[dict[str, str], list[str], set[str]]:
    """Give names and forms a plain secret each, that no form and no variable tells."""
    names = {name: "plain" + next(secrets).replace("-", "").replace("=", "") for name in KEYWORDS}
    marks = ["Zq7" + os.urandom(9).hex() for _ in SAID]
    said = [form.format(mark) for form, mark in zip(SAID, marks, strict=True)]
    return names, said, {*names.values(), *marks}


def test_what_stands_beside_a_secret_name_is_written_nowhere(
    home: Path, db: Path, python: Command, command: Command, secrets: Iterator[str], tmp_path: Path
) -> None:
    names, said, planted = _planted(secrets)
    place = str(ROOT / "provenance" / "data" / "tiny")
    environ = {**os.environ, "PROVENANCE_WRITER": "off"}
    done = python(BESIDE, json.dumps(names), json.dumps(said), place, env=environ)
    assert done.returncode == 0, done.stderr
    journal = b"".join(path.read_bytes() for path in db.parent.rglob("*") if path.is_file())
    assert b"by_name" in journal
    told = [
        command("log", "--json", "-n", "10000"),
        command("sql", "select * from run_overview"),
        command("env", "--json"),
    ]
    runs = [run["run_id"] for run in json.loads(told[0].stdout)]
    assert len(runs) > 300
    told += [command("export", "-o", str(tmp_path / "all.json"), *runs), command("show", runs[0], "--fields")]
    assert {done.returncode for done in told} == {0}, [done.stderr for done in told]
    assert (tmp_path / "all.json").read_bytes().count(b"[redacted]") > 300
    written = [*_written(home, db, []), ("export", (tmp_path / "all.json").read_bytes())]
    written += [("command", (done.stdout + done.stderr).encode()) for done in told] + [("journal", journal)]
    assert {(secret, where) for where, data in written for secret in planted if secret.encode() in data} == set()


def test_what_is_no_secret_stays(python: Command, db: Path) -> None:
    code = (
        "import provenance\n@provenance.record\ndef f(x): return x\n"
        "provenance.init(writer='off')\nf({'eos_token': '<|endoftext|>', 'max_tokens': 12, 'text': 'the secret of https://host/a@b'})\n"
        "provenance.flush()"
    )
    assert python(code).returncode == 0
    import orjson

    from provenance.store import database, queries

    engine = database.reading("", db)
    run = queries.load(engine, queries.find(engine, "last"))
    assert b"the secret of https://host/a@b" in orjson.dumps(str(run.sequences[0].input_value))
    assert "<|endoftext|>" in str(run.sequences[0].input_value)
