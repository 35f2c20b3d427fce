"""The cookbook: its commands and its Python run in the order of the page, on the data of `bothways demo`."""

import ast
import dataclasses
import json
import re
from pathlib import Path

import pytest

import bothways
import bothways.finetuning.run
import bothways.pretraining.run  # whose pages are left empty
from bothways.tasks import predictions
from commands import run_shell_line
from documents import GUIDE, fences
from toy_folder import make_sentence_encoder

PAGE = GUIDE / "cookbook.md"
BLOCKS = [block for block in fences(PAGE) if block[0] in ("bash", "python")]
SHOWN = re.findall(r"^```bash\n([^`]*)```\n\n```text\n([^`]*)```$", PAGE.read_text("utf8"), re.M)
"""Commands, and what they print on the page."""
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
    make_sentence_encoder(folder / "all-MiniLM-L6-v2")
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
                    file = Path(line.rpartition(" --out ")[2])
                    if file.is_file():
                        outputs[line] = file.read_text("utf8")
    return outputs


def test_every_recipe_runs_as_it_is_on_the_page(outputs):
    def printed(line: str) -> list[dict[str, object]]:
        return [json.loads(part) for part in str(outputs[line]).splitlines()]

    both = "The choir sang for an hour. The soup was far too salty."
    queues = outputs["bothways predict tickets new.csv --keep id --out queues.csv"].splitlines()
    assert queues[0].startswith("id,label,probabilities.cards")
    assert len(queues) == 41
    [entities] = printed('bothways predict names "Mira Novak moved from Lima to Oslo ."')
    assert [*entities] == ["entities", "words", "tags"]
    for rerank in ("", " --rerank rank"):
        [found] = printed(f'bothways search animals "Where do bees live?" --top 2{rerank}')
        assert len(found["hits"]) == 2
    [hotel] = printed('bothways predict zh/hotels "虽然房间很干净，但是服务很差，总体很失望。"')
    assert hotel["label"] in {"好评", "差评"}
    [topics] = printed(f'bothways predict topics "{both}"')
    assert {*topics["labels"]} <= {"sport", "food", "travel", "music"}


def names(printed: str) -> set[str]:
    """The names of what is printed: keys of JSON, columns of CSV, rows and columns of tables."""
    if printed.startswith("{"):
        return {*re.findall(r'"(\w+)": ', printed)}
    rows = [re.split(r" *[┃│] *", line)[1:-1] for line in printed.splitlines() if line[0] in "┃│"]
    if rows:
        return {*rows[0], *(row[0] for row in rows)}
    return {*printed.partition("\n")[0].split(",")}


def test_what_the_page_shows_has_the_names_of_what_is_printed(outputs):
    assert len(SHOWN) == 10
    entity = {item.name for item in dataclasses.fields(predictions.Entity)}  # one may not be found
    for block, text in SHOWN:
        printed = [str(outputs[line]) for line in block.splitlines()]
        more = entity if "entities" in text else set()
        assert any(names(text) <= names(each) | more for each in printed), (text, printed)


def test_python_of_each_recipe_gives_what_its_command_does(outputs):
    values = [outputs[text] for language, text in BLOCKS if language == "python"]
    assert len(values) == 10
    queues = {"cards", "transfers", "login", "fees"}
    assert values[0].shape == (2, 4)
    assert [len(values[2]), len(values[3])] == [2, 2]
    assert isinstance(values[5], float)
    assert values[6] in {"好评", "差评"}
    assert {*values[7]} <= queues
    assert {*values[9]} <= queues
