"""The documents against the code: Python examples, command lines, links, and that both languages show the same."""

import ast
import builtins
import functools
import inspect
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import docs_site
import pytest
import yaml

import bothways
from bothways.cli.main import app, rename_options
from bothways.core.config.reader import load
from bothways.pretraining.config import AnyObjective
from bothways.serving.errors import DEFAULT_LIMITS, Limits
from bothways.tasks.catalogue import TASKS
from documents import GUIDE, ROOT, blocks, commands, fences

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
CHINESE = sorted((GUIDE / "zh").rglob("*.md"))
LEARN = ROOT / "docs" / "learn"
PAIRS = [
    (ROOT / "README.md", ROOT / "README.zh.md"),
    (ROOT / "docs" / "index.md", ROOT / "docs" / "zh" / "index.md"),
] + [
    (folder / page.relative_to(folder / "zh"), page)
    for folder in (GUIDE, LEARN)
    for page in sorted((folder / "zh").rglob("*.md"))
]


def every_page(check: Callable[[Path], None]) -> Callable[[], None]:
    """One test of all pages, whose failures name the page."""

    def test() -> None:
        failures = {}
        for page in PAGES:
            try:
                check(page)
            except (AssertionError, pytest.fail.Exception) as error:
                failures[str(page.relative_to(ROOT))] = str(error)
        assert failures == {}

    test.__name__, test.__doc__ = check.__name__, check.__doc__
    return test


def named(node: ast.expr, names: dict[str, Any]) -> Any:
    """What an expression of names and dots stands for; none for what is made at run time."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    owner = named(node.value, names) if isinstance(node, ast.Attribute) else None
    return getattr(owner, node.attr) if inspect.ismodule(owner) or inspect.isclass(owner) else None


@every_page
def test_python_examples_import_what_there_is_and_call_it_rightly(page):
    tree = ast.parse("\n".join(blocks(page, "python")))
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names: dict[str, Any] = {}
    exec(compile(ast.Module(imports, []), str(page), "exec"), names)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        called = named(call.func, names)
        if callable(called) and (getattr(called, "__module__", None) or "").startswith("bothways"):
            arguments = {keyword.arg: None for keyword in call.keywords if keyword.arg}
            try:
                inspect.signature(called).bind(*call.args, **arguments)
            except TypeError as error:
                pytest.fail(f"{ast.unparse(call)}: {error}")


PLACEHOLDERS = {
    "texts", "labels", "model", "tokenizer", "task_model", "training_module", "loader", "folder"
}  # fmt: skip
"""Names in examples that stand for what the reader has."""


@every_page
def test_each_python_example_imports_what_it_uses(page):
    texts = blocks(page, "python")
    if page.is_relative_to(LEARN):  # its blocks are one program
        texts = ["\n".join(texts)]
    for text in texts:
        known, used = {*dir(builtins), *PLACEHOLDERS}, set[str]()
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.alias():
                    known.add(node.asname or node.name)
                case ast.Name(ctx=ast.Store(), id=name) | ast.arg(name) | ast.FunctionDef(name):
                    known.add(name)
                case ast.Name(id=name):
                    used.add(name)
        assert used <= known


@every_page
def test_no_python_example_writes_into_a_folder_of_the_command_lines(page):
    words = [shlex.split(command) for command in commands(page)]
    made = {line[line.index("--out") + 1].rstrip("/") for line in words if "--out" in line}
    writing = {"Path", "save", "save_model", "build"}
    for node in (node for text in blocks(page, "python") for node in ast.walk(ast.parse(text))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in writing:
            written = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            assert made.isdisjoint(str(name).rstrip("/") for name in written)


@functools.cache
def mistake_in(command: str) -> str:
    try:
        words = rename_options(app, shlex.split(command)[1:])
        app.parse_args(words, exit_on_error=False, print_error=False)
    except Exception as error:  # of whatever kind: it is said with its line
        return f"{command}: {error}"
    return ""


@every_page
def test_command_lines_are_understood(page):
    assert [mistake for line in commands(page) if (mistake := mistake_in(line))] == []


@every_page
def test_limits_of_the_server_in_examples_are_accepted(page):
    lines = [shlex.split(command) for command in commands(page)]
    given = [words[words.index("--limit") + 1] for words in lines if "--limit" in words]
    text = "".join(blocks(page, "python"))
    for limits in [*given, *re.findall(r"\bLimits\(([^)]*)\)", text)]:
        load(Limits, base=DEFAULT_LIMITS, overrides=limits.replace(" ", "").split(","))


@every_page
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf8"))
    missing = [target for target in targets if not page.parent.joinpath(target).exists()]
    assert not missing


@functools.cache
def defined(dotted: str) -> bool:
    """Whether a name such as bothways.text.tokenizer.Tokenizer is a module or a word of its code."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        place = ROOT / "src" / Path(*parts[:count])
        if (file := place / "__init__.py").exists() or (file := place.with_suffix(".py")).exists():
            nodes = list(ast.walk(ast.parse(file.read_text("utf8"))))
            words = {getattr(node, name, None) for node in nodes for name in ("name", "id")}
            words |= {node.value for node in nodes if isinstance(node, ast.Constant)}
            return count == len(parts) or parts[count] in words
    return False


@every_page
def test_names_and_files_of_the_code_exist(page):
    if page.name in {"CHANGELOG.md", "log.md"} or page.parent.name == "decisions":
        return  # records of their time
    text = page.read_text("utf8")
    names = re.findall(r"\bbothways(?:\.\w+)+", text)
    names = [name for name in names if not name.endswith((".h", ".json", ".service"))]
    assert [name for name in names if not defined(name)] == []
    files = re.findall(r"`((?:src|tests|benchmarks|examples)/[\w/]+\.py)`", text)
    files += re.findall(r"python (benchmarks/\w+\.py)", text)
    assert [file for file in files if not (ROOT / file).exists()] == []


def other_blocks(page: Path) -> list[tuple[str, str]]:
    """The fenced blocks that are not Python, without comments and what stands to the right of three spaces."""
    return [
        (language, re.sub(r"(?<=\S)[^\S\n]+(?:#|  ).*", "", text))
        for language, text in fences(page)
        if language != "python"
    ]


def named_in_sentences(page: Path) -> set[str]:
    """The commands that are named outside of fenced blocks; one that reads a pipe with a mark of that."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf8"), flags=re.MULTILINE | re.DOTALL)
    return set(re.findall(r"`((?:… \| )?bothways [a-z]+)", text))


@pytest.mark.parametrize(("english", "chinese"), PAIRS, ids=lambda path: path.name)
def test_both_languages_show_the_same_examples(english, chinese):
    programs = [[*map(ast.parse, blocks(page, "python"))] for page in (english, chinese)]
    assert [*map(ast.dump, programs[0])] == [*map(ast.dump, programs[1])]
    assert other_blocks(english) == other_blocks(chinese)
    assert named_in_sentences(english) == named_in_sentences(chinese)


def test_every_page_of_the_guide_is_in_both_languages_and_has_examples():
    english = {page.relative_to(GUIDE) for page in {*GUIDE.rglob("*.md")} - {*CHINESE}}
    assert english == {page.relative_to(GUIDE / "zh") for page in CHINESE}
    assert sum(len(commands(page)) for page in PAGES) > 100
    assert sum(len(blocks(page, "python")) for page in PAGES) > 30


def test_decisions_are_numbered_and_in_the_index():
    folder = ROOT / "docs" / "decisions"
    files = sorted(folder.glob("[0-9]*.md"))
    titles = [file.read_text("utf8").splitlines()[0].removeprefix("# ") for file in files]
    assert [title.split(" · ")[0] for title in titles] == [file.name[:3] for file in files]
    index = (folder / "README.md").read_text("utf8")
    lines = [f"- [{title}]({file.name})" for title, file in zip(titles, files, strict=True)]
    assert [line for line in lines if index.count(line) != 1] == []
    assert index.count("\n- ") == len(files)


def test_experiments_are_in_the_index_of_the_log():
    head, *entries = (ROOT / "docs" / "log.md").read_text("utf8").split("\n## ")
    titles = [entry.splitlines()[0].split(" · ", 1)[1] for entry in entries]
    assert [title for title in titles if head.count(f"[{title}](#") != 1] == []
    assert head.count("](#") == len(titles)


class Settings(yaml.SafeLoader):
    """YAML in which a function is none."""


Settings.add_multi_constructor("tag:yaml.org,2002:python/", lambda *given: None)


def test_every_page_of_the_guide_is_in_the_navigation_of_the_site():
    nav = yaml.load((ROOT / "mkdocs.yml").read_text("utf8"), Settings)["nav"]
    named = list(docs_site.places(nav))
    assert len(set(named)) == len(named)
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    wanted = {page for page in pages if not page.startswith("decisions/")}
    assert wanted - set(named) == set(), "add a line to nav in mkdocs.yml, in both languages"
    assert set(named) - wanted == {
        *docs_site.OUTSIDE.values(), *docs_site.FOLDERS.values(), "reference/index.md", "reference/commands.md"
    } - wanted  # fmt: skip
    for group in ("guide/", "guide/families/", "learn/"):
        english, chinese = ([page for page in named if Path(page).parent == Path(each)]
                            for each in (group, re.sub("^(guide|learn)/", r"\1/zh/", group)))  # fmt: skip
        assert [docs_site.translation(page) for page in english] == chinese


@pytest.mark.parametrize(
    ("readme", "guide"), [("README.md", GUIDE), ("README.zh.md", GUIDE / "zh")]
)
def test_the_readme_links_every_page_of_the_guide(readme, guide):
    text = (ROOT / readme).read_text("utf8")
    pages = [str(page.relative_to(ROOT)) for page in guide.glob("*.md")]
    missing = [page for page in pages if f"]({page})" not in text]
    assert missing == [], f"link these pages in {readme}"


@pytest.mark.parametrize("guide", [GUIDE, GUIDE / "zh"], ids=["english", "chinese"])
def test_the_guide_has_every_objective_and_every_task_that_is_trained(guide):
    pretrain, finetune = (
        (guide / f"{page}.md").read_text("utf8") for page in ("pretrain", "finetune")
    )
    objectives = {cls.__dataclass_fields__["kind"].default for cls in get_args(AnyObjective)}
    missing = {kind for kind in objectives if f"| `{kind}`" not in pretrain}
    assert missing == set(), "add a row to the objectives in pretrain.md"
    tasks = {kind for kind in TASKS if not (guide / f"{kind}.md").exists()}
    missing = {kind for kind in tasks if f"| {kind} |" not in finetune}
    assert missing == set(), "add a row to the tasks in finetune.md, or a page"


def test_every_public_name_and_command_is_in_the_reference():
    pages = docs_site.reference()
    names, page = pages["reference/index.md"], pages["reference/commands.md"]
    assert re.findall(r"^::: bothways\.(\w+)$", names, re.MULTILINE) == bothways.__all__
    named = re.findall(r"^## bothways ([\w-]+)$", page, re.MULTILINE)
    assert set(named) == {name for name in app if not name.startswith("-")}
    shown = re.findall(r"^```bash\n(bothways .*)\n```$", page, re.MULTILINE)
    assert len(shown) == len(re.findall(r"^```console$", page, re.MULTILINE))
    for name, subject in docs_site.packages():
        assert f"::: bothways.{name}\n" in pages[f"reference/{name}.md"]
        assert subject


def test_lists_are_indented_for_the_site():
    text = "Text:\n1. one\n   - inner\n\n   | a |\n   |---|\n2. two\n   lines\n\n```\n- code\n```\n"
    assert docs_site.indented(text) == (
        "Text:\n\n1. one\n    - inner\n\n    | a |\n    |---|\n\n2. two\n    lines\n\n```\n- code\n```\n"
    )


@every_page
def test_no_line_of_a_sentence_looks_like_an_item_of_a_list(page):
    text, other = page.read_text("utf8"), set[int]()  # items, and lines of code
    for token in docs_site.COMMON_MARK.parse(text):
        if token.map and token.type in {"list_item_open", "fence", "code_block", "html_block"}:
            begin, end = token.map
            other |= {begin} if token.type == "list_item_open" else set(range(begin, end))
    lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if n - 1 not in other]
    looks = re.compile(r" *(?:[-*+]|\d+\.) ")  # the site begins a list there, a code host does not
    assert [(n, line) for n, line in lines if looks.match(line)] == []


def test_each_chinese_paragraph_is_one_line():
    """A break in a line is shown as a space, which Chinese sentences do not have."""
    docs = ROOT / "docs"
    pages = [page for page in docs.rglob("*.md") if docs_site.chinese(str(page.relative_to(docs)))]
    broken = [
        f"{page.relative_to(ROOT)}:{token.map[0] + 1}"
        for page in pages
        for token in docs_site.COMMON_MARK.parse(page.read_text("utf8"))
        if token.type == "inline" and token.map and token.map[1] - token.map[0] > 1
    ]
    assert broken == []
    assert len(pages) > 60


def test_pages_of_the_site_link_terms_to_the_glossary():
    terms = docs_site.glossary("glossary.md")
    page = (
        "<h2>Early stopping</h2><p>Cross-encoders: <code>early stopping</code>, early stopping.</p>"
    )
    meaning = terms["early stopping"][1]
    linked = docs_site.explained(page, terms, "g.html")
    assert (
        f'</code>, <a class="term" href="g.html#early-stopping" title="{meaning}">early' in linked
    )
    assert ">Cross-encoders</a>" in linked
    assert docs_site.explained(page * 2, terms, "g.html") == linked + page
    chinese = docs_site.glossary("glossary.zh.md")
    assert 'g.html#cross-encoder"' in docs_site.explained("训练交叉编码器。", chinese, "g.html")


def test_links_of_the_site():
    def linked(link: str, page: str) -> str:
        return docs_site.linked(f"[text]({link})", page).removeprefix("[text](").removesuffix(")")

    assert linked("../../CONTRIBUTING.md#rules", "guide/serve.md") == "../contributing.md#rules"
    assert linked("../README.zh.md", "glossary.zh.md") == "zh/index.md"
    assert linked("../guide/zh", "zh/index.md") == "../guide/zh/index.md"
    assert (
        linked("../../examples/03_own_objective.py", "guide/pretrain.md")
        == "../examples/03_own_objective.md"
    )
    assert linked("../../Makefile", "guide/serve.md") == "../files/Makefile.md"
    assert linked("https://example.org/docs/guide", "index.md") == "https://example.org/docs/guide"
    fenced = "```\n[text](docs/guide)\n```\n"
    assert docs_site.linked(fenced, "index.md") == fenced
