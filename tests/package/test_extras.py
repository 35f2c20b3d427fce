"""Optional packages: fine-tuning, prediction and embedding work without them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from toy_folder import make_examples, make_folder, write_tsv

OPTIONAL = (
    "datasets", "google_crc32c", "jinja2", "matplotlib", "onnx",
    "onnxruntime", "openvino", "pyarrow", "scipy", "sklearn",
    "tensorboard", "transformers", "zstandard",
)  # fmt: skip


def run(*words: object) -> subprocess.CompletedProcess[str]:
    """Run `bothways` where none of the optional packages can be imported."""
    code = f"""
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name in {OPTIONAL} else find(name, *rest)
from bothways.cli.main import main
main()
"""
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_fine_tuning_and_prediction_without_optional_packages(tmp_path: Path) -> None:
    model, tuned = make_folder(tmp_path / "bert"), tmp_path / "tuned"
    train = write_tsv(tmp_path / "train.tsv", make_examples(32, 0))
    dev = write_tsv(tmp_path / "dev.tsv", make_examples(16, 1))
    words = ("--train", train, "--dev", dev, "--out", tuned, "--epochs", 1, "--max-length", 32)
    done = run("finetune", model, *words)
    assert done.returncode == 0, done.stderr
    assert not (tuned / "tensorboard").exists()
    assert not (tuned / "report.html").exists()

    texts = tmp_path / "texts.txt"
    texts.write_text("good bad\n", encoding="utf8")
    done = run("predict", tuned, texts)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1

    done = run("embed", tuned, texts, "--out", tmp_path / "vectors.parquet")
    assert done.returncode == 2
    assert "'pyarrow', which is not installed" in done.stderr
    assert 'pip install "bothways[data]"' in done.stderr

    done = run("export", tuned, "--out", tmp_path / "exported")
    assert done.returncode == 2
    assert "needs the package 'onnx', which is not installed" in done.stderr
    assert 'pip install "bothways[export]"' in done.stderr
