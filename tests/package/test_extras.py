"""Optional packages: fine-tuning, prediction and embedding work without them."""

import json
import subprocess
import sys

from toy_folder import make_examples, make_folder, write_tsv

OPTIONAL = (
    "datasets", "google_crc32c", "jinja2", "matplotlib", "onnx",
    "onnxruntime", "openvino", "pyarrow", "scipy", "sklearn",
    "tensorboard", "transformers", "zstandard",
)  # fmt: skip


CODE = f"""
import contextlib, io, json, sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name in {OPTIONAL} else find(name, *rest)
from bothways.cli.main import run_command_line
results = []
for words in json.loads(sys.argv.pop()):
    sys.argv[1:], status, out, err = words, 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run_command_line()
        except SystemExit as ended:
            status = ended.code
    results.append((status, out.getvalue(), err.getvalue()))
print(json.dumps(results))
"""
"""Runs command lines where none of the optional packages can be imported, all in one process."""


def test_fine_tuning_and_prediction_without_optional_packages(tmp_path):
    model, tuned = make_folder(tmp_path / "bert"), tmp_path / "tuned"
    train = write_tsv(tmp_path / "train.tsv", make_examples(32, 0))
    dev = write_tsv(tmp_path / "dev.tsv", make_examples(16, 1))
    texts = tmp_path / "texts.txt"
    texts.write_text("good bad\n", encoding="utf8")
    domain = tmp_path / "domain.txt"
    domain.write_text(
        "\n\n".join(example.text for example in make_examples(200, 2)), encoding="utf8"
    )
    lines = [
        f"finetune {model} --train {train} --dev {dev} --out {tuned} --epochs 1 --max-length 32",
        f"predict {tuned} {texts}",
        f"embed {tuned} {texts} --out {tmp_path / 'vectors.parquet'}",
        f"export {tuned} --out {tmp_path / 'exported'}",
        f"evaluate {tuned} {dev} --report {tmp_path / 'page.html'}",
        f"adapt {model} {domain} --until 2steps --out {tmp_path / 'adapted'}",
    ]
    words = [sys.executable, "-c", CODE, json.dumps([line.split() for line in lines])]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    finetune, predict, embed, export, evaluate, adapt = json.loads(done.stdout)
    assert finetune[0] == 0, finetune[2]
    assert not (tuned / "tensorboard").exists()
    assert not (tuned / "report.html").exists()
    assert f"note: no {tuned / 'report.html'}" in finetune[2]
    assert predict[0] == 0, predict[2]
    assert predict[1].count("\n") == 1
    assert embed[0] == 2
    assert "'pyarrow', which is not installed" in embed[2]
    assert 'pip install "bothways[data]"' in embed[2]
    assert export[0] == 2
    assert "needs the package 'onnx', which is not installed" in export[2]
    assert 'pip install "bothways[export]"' in export[2]
    assert evaluate[0] == 2
    assert "a report needs the package 'jinja2', which is not installed" in evaluate[2]
    assert adapt[0] == 0, adapt[2]
    assert adapt[2].count("report.html") == 1
    assert f"note: no {tmp_path / 'adapted' / 'report.html'}" in adapt[2]
