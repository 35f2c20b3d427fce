"""The guide's pages about families against the presets: the lines of configuration, the sizes, and that none is left out."""

import functools
import re
from pathlib import Path

import pytest

from bothways.core.config.reader import config_difference, load
from bothways.model.config import EncoderConfig
from bothways.model.families.catalogue import FAMILIES, PRESETS, preset
from bothways.model.parameters import parameter_table
from documents import GUIDE, blocks

ENGLISH, CHINESE = (sorted((GUIDE / language / "families").glob("*.md")) for language in ("", "zh"))
OVERVIEWS = [GUIDE / "families.md", GUIDE / "zh" / "families.md"]
PAGES = [*ENGLISH, *CHINESE, *OVERVIEWS]


def lines_by_preset(page: Path) -> dict[str, list[str]]:
    """Lines of configuration by the preset that a comment in the first line names."""
    found = [text.splitlines() for text in blocks(page, "toml")]
    return {head.removeprefix("# "): lines for head, *lines in found if head.startswith("# ")}


@functools.cache
def settings(name: str) -> list[str]:
    """The settings in which a preset differs from BERT-base."""
    return config_difference(preset(name), preset("bert-base"))


@functools.cache
def sizes(page: Path) -> dict[str, list[str]]:
    """The cells of the table of sizes, by preset."""
    found = re.findall(
        r"^\| `(\S+)` \| (\d+ × \d+) \| ([\d,]+) \|$", page.read_text("utf8"), re.MULTILINE
    )
    return {name: cells for name, *cells in found}


@functools.cache
def exact_sizes(name: str) -> list[str]:
    config = preset(name)
    return [f"{config.depth} × {config.width}", f"{parameter_table(config).total:,}"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(GUIDE)))
def test_a_page_says_what_the_presets_are(page):
    said = lines_by_preset(page)
    assert said
    for name, lines in said.items():
        assert lines == settings(name)
    for name, cells in sizes(page).items():
        assert cells == exact_sizes(name)


@pytest.mark.parametrize("name", PRESETS)
def test_the_lines_make_the_preset_of_bert(name, tmp_path):
    (tmp_path / "lines.toml").write_text("\n".join(settings(name)))
    read = load(EncoderConfig, base=preset("bert-base"), file=tmp_path / "lines.toml")
    assert read == preset(name)


def test_the_sizes_are_the_same_in_both_languages():
    for english, chinese in zip([*ENGLISH, OVERVIEWS[0]], [*CHINESE, OVERVIEWS[1]], strict=True):
        assert sizes(english) == sizes(chinese)


def test_no_preset_and_no_family_is_left_out():
    listed = [name for page in ENGLISH for name in sizes(page)]
    page = "write them on a page in docs/guide/families, from bothways describe PRESET"
    assert len(listed) == len({*listed})
    assert {*listed} ^ PRESETS.keys() == set(), page
    texts = "".join(page.read_text("utf8") for page in ENGLISH)
    unnamed = [f.model_type for f in FAMILIES if f"`{f.model_type}`" not in texts]
    assert unnamed == [], page


@pytest.mark.parametrize("overview", OVERVIEWS, ids=["english", "chinese"])
def test_the_overview_links_every_page(overview):
    linked = re.findall(r"\]\(families/(\S+?\.md)\)", overview.read_text("utf8"))
    assert sorted(linked) == [page.name for page in ENGLISH], f"link every page in {overview.name}"
