"""demo: readable prompts and answers, the records in SQL, and the real cause named first; and the README shows what it prints."""

import os
import re
from pathlib import Path

import pytest

from provenance.cli import demo, gemma
from tests.conftest import Command

ROOT = Path(demo.__file__).parents[2]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Run the demo once, as a stranger does."""
    import subprocess
    import sys

    home = tmp_path_factory.mktemp("home")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PROVENANCE_", "XDG_"))}
    found = subprocess.run(
        [sys.executable, "-m", "provenance", "demo"], capture_output=True, text=True, timeout=200, check=False,
        env={**environ, "HOME": str(home), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert "Traceback" not in found.stderr
    return found.stdout


def test_prompts_and_answers_are_readable(printed: str) -> None:
    for prompt in demo.PROMPTS:
        assert f"   {prompt} ▸ " in printed
    assert "iterate over the elements of a sequence" in printed


def test_the_records_are_shown_in_sql(printed: str) -> None:
    assert demo.SQL in printed
    assert len(re.findall(r"^\d{4}-\d\d-\d\dT\S+ +alone +1 ", printed, re.MULTILINE)) == len(demo.PROMPTS)
    assert re.search(r"^\d{4}-\d\d-\d\dT\S+ +batch +\d ", printed, re.MULTILINE)


def test_the_first_cause_is_the_batch_and_its_padding(printed: str) -> None:
    story = printed[printed.index("Near tie") :]
    first = re.search(r"1\. (\S+): 1 in A, (\d) in B", story)
    assert first is not None
    assert first[1] == "batch.size"
    assert "another batch and its padding" in story
    assert re.search(r"batch\.padding_tokens", story)
    assert re.search(r"The outputs part at token \d+\.", story)
    assert re.search(r"A chose \d+ '.*', [\d.e-]+ \([\d.e-]+ ulp\) ahead of \d+", story)


def test_the_readme_shows_what_the_demo_prints(printed: str) -> None:
    """Numbers and words differ from machine to machine; the lines are the same ones."""

    def shape(text: str) -> list[str]:
        text = re.sub(r"'[^']*'", "'…'", text)
        text = re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}", "RUN", text)
        return [re.sub(r"[\d.]+(e-?\d+)?", "N", line).strip() for line in text.strip().splitlines()]

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = readme.partition("<!-- demo: diff -->\n```\n")[2].partition("\n```")[0]
    story = printed[printed.index("Near tie") : printed.index("Differs and cannot")]
    assert shape(block) == shape(story)


def test_the_real_model_asks_before_it_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(Exception, match="provenance demo --real --yes"):
        gemma._fetch(yes=False)


@pytest.mark.real
def test_the_real_model_parts_and_is_explained(command: Command) -> None:
    """Runs where the 270 M model lies in the cache of whoever runs it."""
    home = os.environ.get("PROVENANCE_REAL_HOME", "/root")
    if not (Path(home) / ".cache/provenance/gemma-3-270m-bf16/done").exists():
        pytest.skip("the model is not in the cache: run `provenance demo --real --yes` once")
    found = command("demo", "--real", "--tokens", "48", env={**os.environ, "HOME": home})
    assert found.returncode == 0, found.stderr
    assert "Near tie" in found.stdout
    assert re.search(r"1\. batch\.size: 1 in A, 4 in B", found.stdout)
