"""`bothways settings` and the pages of all settings against the declarations.

`PYTHONPATH=tests/helpers python tests/package/test_settings_page.py` writes the pages again.
"""

import dataclasses
import json

import pytest

from bothways.cli.inspection import all_settings
from bothways.core.config.reader import to_dict
from bothways.core.config.values import flatten
from bothways.core.errors import ConfigError
from bothways.finetuning.config import FinetuneConfig, load_config
from bothways.model.families.catalogue import preset
from bothways.pretraining.config import load_pretraining
from bothways.pretraining.recipes import modern
from commands import run_line
from documents import GUIDE

HEADS = {
    GUIDE / "settings.md": "| setting | default | values | meaning |",
    GUIDE / "zh" / "settings.md": "| 设置 | 默认值 | 取值 | 含义 |",
}
START = "## bothways "


def tables(head: str) -> str:
    """The tables of a page: one for each command."""
    parts = []
    for command, rows in all_settings().items():
        lines = [f"{START}{command}", "", head, "|---|---|---|---|"]
        for row in rows:
            path = f"`{row.path}`" + (f", `{row.name}`" if row.name else "")
            kinds = f" ({', '.join(row.kinds)})" if row.kinds else ""
            default = f"`{row.default}`" if row.default else ""
            meaning = row.meaning.replace("|", "\\|")
            lines.append(f"| {path}{kinds} | {default} | {row.values} | {meaning} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


@pytest.mark.parametrize("page", HEADS, ids=["en", "zh"])
def test_the_page_has_the_settings_of_the_code(page):
    text = page.read_text("utf8")
    assert text[text.index(START) :] == tables(HEADS[page]), (
        "write it again: PYTHONPATH=tests/helpers python tests/package/test_settings_page.py"
    )


def test_no_setting_of_a_run_is_missing_or_without_a_meaning():
    listed = {command: {row.path for row in rows} for command, rows in all_settings().items()}
    runs = {"finetune": FinetuneConfig(), "pretrain": modern(preset("bert-base"))}
    for command, config in runs.items():
        for path in flatten(to_dict(config)):
            assert path.endswith("kind") or path in listed[command], path
    assert [row for rows in all_settings().values() for row in rows if not row.meaning] == []


@pytest.mark.parametrize(
    ("command", "base", "load"),
    [
        ("finetune", FinetuneConfig(), load_config),
        ("pretrain", modern(preset("bert-base")), load_pretraining),
    ],
)
def test_each_default_reads_as_the_value_that_a_run_has(command, base, load):
    rows = [row for row in all_settings()[command] if not row.kinds]
    read = 0
    for row in rows:
        parts = row.path.split(".")
        if row.default and parts[0] not in {"metrics", "model", "train"} and "0" not in parts:
            value = base
            for part in parts:
                value = getattr(value, part, dataclasses.MISSING)
            if value is not dataclasses.MISSING:
                kind = ".kind" if hasattr(value, "kind") and row.default == value.kind else ""
                assert load(base, [f"{row.path}{kind}={row.default}"]) == base, row
                read += 1
    assert read > 20


def test_a_prefix_filters(capsys):
    run_line("settings", "masking.unit", "--command", "pretrain", "--json")
    rows = json.loads(capsys.readouterr().out)
    assert {row["path"].partition("masking.unit")[1] for row in rows} == {"masking.unit"}
    run_line("settings", "lr", "--command", "finetune")
    assert 'training.optimizer.lr = "auto" (or lr): a number or auto' in capsys.readouterr().out
    with pytest.raises(ConfigError, match="did you mean dropout"):
        run_line("settings", "dropoutt")


if __name__ == "__main__":
    for page, head in HEADS.items():
        text = page.read_text("utf8")
        page.write_text(text[: text.index(START)] + tables(head), "utf8")
