"""The page in a real browser: it lays out, the dark is dark, and hostile text does nothing.

Long, because a browser is a heavy install: `apt-get install chromium`. Without one the test fails and says so.
"""

import shutil
import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from provenance.explain import compare, page, reports
from tests.explain.test_page import HOSTILE, told
from tests.fakes.runs import run, step

pytestmark = pytest.mark.long
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars",
         "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND")  # fmt: skip
ATTACK = "</title></style><script>document.title='taken';document.body.innerHTML=''</script>" + HOSTILE


@pytest.fixture
def browser(tmp_path: Path) -> list[str]:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    assert found, f"no browser of {', '.join(NAMES)} is installed; on Debian: apt-get install chromium"
    return [found, *QUIET, f"--user-data-dir={tmp_path / 'profile'}"]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Write the page of two runs of sixty tokens that part at the fortieth, one of them hostile in every text."""
    tokens = list(range(100, 160))
    steps = [step(token, 99, 0.02 + token % 9) for token in tokens]
    other = [*steps[:40], replace(steps[40], token=7, margin=0.03), *steps[41:]]
    a = run([tokens], steps=[steps], fields={"batch.size": 1})
    b = run([[item.token for item in other]], steps=[other], fields={"batch.size": 8, "my.own": ATTACK}, run_id=ATTACK)
    a, b = told(a, b, "A calm answer.", "A calm " + ATTACK)
    answer = compare.compare(a, b)
    reports.settle(answer)
    path = tmp_path / "page.html"
    path.write_text(page.page(answer, a, b), encoding="utf-8")
    return path


def test_it_is_read_as_written_and_no_text_of_others_acts(browser: list[str], written: Path) -> None:
    found = subprocess.run(
        [*browser, "--dump-dom", written.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    dom = found.stdout
    assert "<title>Divergent" in dom
    assert "taken</title>" not in dom
    for title in (
        "Where they part",
        "The two outputs",
        "How close each choice was",
        "What to do",
        "All fields, by layer",
    ):
        assert f"<h2>{title}" in dom, title
    assert "<script" not in dom.replace("&lt;script", "")
    assert dom.rstrip().endswith("</html>")
    assert "</main></body>" in dom.replace("\n", "")


def test_it_is_drawn_in_light_and_in_the_dark(browser: list[str], written: Path, tmp_path: Path) -> None:
    pictures = []
    for scheme in (1, 0):  # light, dark
        file = tmp_path / f"{scheme}.png"
        subprocess.run(
            [*browser, f"--blink-settings=preferredColorScheme={scheme}", "--window-size=1000,1400", f"--screenshot={file}",
             written.as_uri()], capture_output=True, timeout=120, check=True,
        )  # fmt: skip
        pictures.append(file.read_bytes())
    for picture in pictures:
        assert picture[:8] == b"\x89PNG\r\n\x1a\n"
        assert struct.unpack(">II", picture[16:24]) == (1000, 1400)
        assert len(picture) > 40_000  # an empty page of this size packs into a few thousand bytes
    assert pictures[0] != pictures[1]
