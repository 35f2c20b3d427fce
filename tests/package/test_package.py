"""What the package promises as a whole: its names, its layers, its weight at start-up."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import bothways

SOURCE = Path(bothways.__file__).parent

LAYERS = [
    {"core"},
    {"core.runtime", "core.jobs", "core.report"},
    {"model.kernels"},
    {"model.attention"},
    {"model"},
    {"model.families", "text", "data.cleaning"},
    {"hub", "data", "training"},
    {"tasks", "objectives"},
    {"prediction"},
    {"prediction.analysis"},
    {"pretraining", "finetuning"},
    {"lab.sweeps"},
    {"lab", "prediction.export", "prediction.bulk", "serving"},
    {"cli"},
]
"""A package may import those of its own layer and of the layers before it. One that is not named
belongs to the layer of the package around it."""
PACKAGES = set().union(*LAYERS)


def package_of(module: str) -> str:
    """The longest name of a package in LAYERS that a module is in; "" if there is none."""
    words = module.split(".")
    names = (".".join(words[:end]) for end in range(len(words), 0, -1))
    return next((name for name in names if name in PACKAGES), "")


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(SOURCE).with_suffix("").parts)


def imports(file: Path) -> set[str]:
    """The packages of bothways that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf8"))):
        match node:
            case ast.ImportFrom():
                assert node.level == 0, f"{file} has a relative import"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            case ast.Import():
                names = [alias.name for alias in node.names]
            case _:
                names = []
        modules = [name.removeprefix("bothways.") for name in names if name.startswith("bothways.")]
        found |= {package_of(bothways._HOME.get(module, module)) for module in modules}
    return found - {""}


def test_every_way_to_import_is_seen(tmp_path):
    file = tmp_path / "module.py"
    for line in (
        "import bothways.text.template",
        "from bothways import text",
        "from bothways import Tokenizer",
        "from bothways.text import template",
    ):
        file.write_text(f"def late():\n    {line}\n")
        assert imports(file) == {"text"}, line
    file.write_text(
        "from bothways import __version__\nimport bothways\nimport text\nfrom text import bothways\n"
    )
    assert imports(file) == set()
    file.write_text("from . import text\n")
    with pytest.raises(AssertionError, match="relative"):
        imports(file)


@pytest.mark.parametrize("layer", range(len(LAYERS)))
def test_dependencies_point_one_way(layer):
    allowed = set().union(*LAYERS[: layer + 1])
    for package in LAYERS[layer]:
        folder = SOURCE / package.replace(".", "/")
        files = [file for file in folder.rglob("*.py") if package_of(module_of(file)) == package]
        assert files
        for file in files:
            wrong = imports(file) - allowed
            assert not wrong, f"{file.relative_to(SOURCE)} imports {wrong}"


def test_no_package_is_left_out_of_the_layers():
    packages = {path.name for path in SOURCE.iterdir() if path.is_dir()}
    assert packages - {"__pycache__"} == {name for name in PACKAGES if "." not in name}
    assert all((SOURCE / name.replace(".", "/") / "__init__.py").exists() for name in PACKAGES)


def shape_annotations(source: str) -> list[ast.Subscript]:
    """The `Float[...]` of a module, by the names that it imports from jaxtyping."""
    tree = ast.parse(source)
    dtypes, found = set[str](), list[ast.Subscript]()
    for node in ast.walk(tree):  # imports, at the top of the tree, come first
        match node:
            case ast.ImportFrom(module="jaxtyping", names=names):
                dtypes |= {alias.asname or alias.name for alias in names}
            case ast.Subscript(value=ast.Name(id=name)) if name in dtypes:
                found.append(node)
    return found


def test_shape_annotations_are_of_classes():
    """`NDArray` is a type alias since numpy 2.5, which jaxtyping refuses when it is evaluated."""
    annotations = {
        f"{file.relative_to(SOURCE)}:{node.lineno}": ast.unparse(node)
        for file in SOURCE.rglob("*.py")
        if "jaxtyping" in (source := file.read_text("utf8"))
        for node in shape_annotations(source)
    }
    assert len(annotations) > 100
    assert not {name: text for name, text in annotations.items() if "NDArray" in text}


def test_a_module_needs_no_import_of_its_own(monkeypatch):
    monkeypatch.delattr(bothways, "serving", raising=False)  # as if nothing had imported it
    assert callable(bothways.serving.app)


def test_a_name_that_is_not_public_is_an_error():
    with pytest.raises(AttributeError, match="has no attribute 'Bert'"):
        _ = bothways.Bert


def processor_time() -> float:
    """Of the processes that have ended: it does not grow when others use the machine."""
    times = os.times()
    return times.children_user + times.children_system


COMMANDS = """
from cyclopts import App
app = App()
for number in range(31):
    def command(): "Read a file of texts, and write another one."
    app.command(command, name=f"command{number}")
app(["--help"])
"""
"""The help of as many commands by cyclopts alone."""


def test_import_and_help_are_light():
    heavy = {"torch", "datasets", "transformers", "matplotlib", "numpy", "pydantic"}
    words = ["-m", "bothways", "--help"]

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)

    lines = run("-X", "importtime", *words).stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines}
    assert "rich.markdown" in imported
    assert not imported & heavy
    seconds, reference = list[float](), list[float]()
    for _ in range(3):
        start = processor_time()
        run("-c", COMMANDS)
        middle = processor_time()
        shown = run(*words).stdout
        reference.append(middle - start)
        seconds.append(processor_time() - middle)
    # Neighbours on a core slow both down; on a quiet one it is 1.4 times.
    assert min(seconds) < max(0.5, 2 * min(reference)), (seconds, reference)
    for verb in ("quickstart", "tokenizer", "corpus", "pretrain", "finetune", "predict"):
        assert verb in shown


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_that_the_output_goes_to_is_one_message(unbuffered):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "bothways", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert done.stderr.startswith("error: the output cannot be written: No space left on device\n")
    assert done.stderr.count("\n") == 2
    assert done.returncode == 2
