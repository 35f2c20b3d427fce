"""The hooks by which MkDocs makes a site of the documentation: `make docs`, with `mkdocs.yml`.

The pages are written for a code host. Three things are done for the site:

- Files outside of `docs/` become pages (CONTRIBUTING, CHANGELOG, examples), folders that
  are linked get an index, and links are rewritten to these; links to the README lead to the
  landing page. A page with the public names, one for the command line and one for each
  sub-package are generated from docstrings.
- Lists are indented by four columns, as Python-Markdown reads them; the result is compared with
  CommonMark's.
- Formulas become MathML and figures a part of their page; each chapter of `docs/learn/` is also a
  notebook.
- A Chinese page has Chinese navigation and names, and a page links to its translation. The first
  use of a term of the glossary on a page links to it.
"""

from __future__ import annotations

import ast
import base64
import copy
import itertools
import json
import logging
import posixpath
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markdown_it import MarkdownIt

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.nav import Navigation
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent
SOURCE = ROOT / "src" / "bothways"
LOG = logging.getLogger("mkdocs.hooks.bothways")
COMMON_MARK = MarkdownIt("commonmark").enable("table")

OUTSIDE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples/index.md",
}
"""The page of each file of the repository that is outside of `docs/`."""
FOLDERS = {
    "README.md": "index.md",
    "README.zh.md": "zh/index.md",
    "docs/guide": "guide/index.md",
    "docs/guide/zh": "guide/zh/index.md",
    "docs/decisions": "decisions/README.md",
    "examples": "examples/index.md",
}
"""The page that a link to a folder, or to the README, leads to."""
SHARED = {"Reference": "参考", "Project": "项目"}
"""The parts of the navigation that pages of both languages have, with their Chinese titles."""
GLOSSARIES = ("glossary.md", "glossary.zh.md")
LINK = re.compile(r"(!?\[[^\]]*\]\()([^()\s#:]+)((?:#[^()\s]*)?\))")
TRANSLATION = re.compile(r"^\[(中文|English)\]\([^)]*\)\n\n", re.MULTILINE)
FAVICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24">'
    '<path fill="#3f51b5" d="m21 9-4-4v3h-7v2h7v3m-10-2-4 4 4 4v-3h7v-2H7z"/></svg>\n'
)

IFRAME_WORKER = """// A page that is opened from a folder may not start workers: the search runs
// in a frame, whose script looks for the class by its name.
if (location.protocol === "file:") window.Worker = window.IFrameWorker = class extends EventTarget {
  constructor(url) {
    super();
    this.onmessage = this.onerror = null;
    const frame = Object.assign(document.createElement("iframe"), {hidden: true});
    this.ready = new Promise(resolve => document.addEventListener("DOMContentLoaded", () => {
      document.body.append(frame);
      const inner = frame.contentWindow;
      const load = source => new Promise(done => {
        const script = inner.document.createElement("script");
        Object.assign(script, {src: source, onload: done, onerror: done});
        inner.document.head.append(script);
      });
      inner.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
      inner.postMessage = data => {
        const event = new MessageEvent("message", {data});
        this.dispatchEvent(event);
        this.onmessage?.(event);
      };
      load(new URL(url, document.baseURI).href).then(() => resolve(inner));
    }));
  }
  postMessage(data) {
    this.ready.then(inner => inner.dispatchEvent(new MessageEvent("message", {data})));
  }
  terminate() {}
};
"""
"""What the settings name as a polyfill, so that no other one is fetched from a host."""


def chinese(source: str) -> bool:
    """Return whether a page is one of the Chinese ones."""
    return source.startswith(("zh/", "guide/zh/", "learn/zh/")) or source.endswith(".zh.md")


def translation(source: str) -> str:
    """Return the page in the other language; the start page if there is none."""
    for folder in ("guide/", "learn/"):
        if source.startswith(f"{folder}zh/"):
            return source.replace("zh/", "", 1)
        if source.startswith(folder):
            return source.replace(folder, f"{folder}zh/", 1)
    if source in GLOSSARIES:
        return GLOSSARIES[not chinese(source)]
    return "index.md" if chinese(source) else "zh/index.md"


FORMULA = re.compile(r"^```math\n(.*?)^```$|\$`([^`]+)`\$", re.MULTILINE | re.DOTALL)
"""A formula of its own lines, or within one, as code hosts read it."""
FIGURE = re.compile(r"!\[([^\]]*)\]\(([\w./-]+\.svg)\)")
CELL = re.compile(r"^```python\n(.*?)^```\n+(?:^```text\n(.*?)^```\n?)?", re.MULTILINE | re.DOTALL)


def cells(text: str) -> list[tuple[str, str]]:
    """Return the Python blocks of a page, each with the `text` block after it: what it prints."""
    return CELL.findall(f"{text}\n")


def notebook(text: str, folder: Path) -> str:
    """Return a page as a notebook that needs no other file: modules and figures are in it."""
    parts: list[dict[str, Any]] = []

    def add(kind: str, source: str, **more: Any) -> None:
        parts.append({"cell_type": kind, "id": f"cell-{len(parts)}", "metadata": {}, **more,
                      "source": source.strip("\n")})  # fmt: skip

    def code(source: str, output: str = "") -> None:
        stream = {"output_type": "stream", "name": "stdout", "text": output}
        add("code", source, execution_count=None, outputs=[stream] if output else [])

    learn = ROOT / "docs" / "learn"
    imported = set(re.findall(r"^(?:from|import) (bert|toyworld)\b", text, re.MULTILINE))
    modules = [
        f"{name}.py"
        for name in ("bert", "toyworld")  # toyworld imports bert
        if name in imported or (name == "bert" and imported)
    ]

    def beside(match: re.Match[str]) -> str:
        """Return a link to a file that lies next to the notebook; of other pages, the name."""
        if re.fullmatch(r"(?!index)[\w-]+\.md", match[2]):
            return f"{match[1]}{match[2].removesuffix('.md')}.ipynb)"
        return match[0] if match[2] in modules else match[1][1:-2]

    text = TRANSLATION.sub("", text, count=1)
    text = FORMULA.sub(lambda m: f"$${m[1]}$$" if m[1] else f"${m[2]}$", f"{text}\n")
    written = False  # the modules, after the first words of the page
    pieces = CELL.split(text)  # prose, code, output, prose, …
    for prose, source, output in itertools.zip_longest(pieces[::3], pieces[1::3], pieces[2::3]):
        if prose.strip():
            paths = {Path(path).name: folder / path for _, path in FIGURE.findall(prose)}
            images = {
                name: {"image/svg+xml": base64.b64encode(path.read_bytes()).decode()}
                for name, path in paths.items()
            }
            shown = FIGURE.sub(lambda m: f"![{m[1]}](attachment:{Path(m[2]).name})", prose)
            add("markdown", LINK.sub(beside, shown), **({"attachments": images} if images else {}))
        if source:
            for name in () if written else modules:
                code(f"%%writefile {name}\n{(learn / name).read_text('utf8')}")
            written = True
            code(source, output or "")
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return json.dumps(
        {"cells": parts, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5},
        ensure_ascii=False, indent=1,
    )  # fmt: skip


def drawn(text: str, folder: Path) -> str:
    """Return a page whose formulas are MathML, and whose figures have the colour of its text."""
    from latex2mathml.converter import convert

    def formula(match: re.Match[str]) -> str:
        if match[1]:
            return f"<div>{convert(match[1].strip(), display='block')}</div>"
        return convert(match[2])

    def figure(match: re.Match[str]) -> str:
        svg = re.sub(
            r"<style>.*?</style>\s*", "", (folder / match[2]).read_text("utf8"), flags=re.DOTALL
        )
        return f'<div role="img" aria-label="{match[1]}">{svg}</div>'

    return FIGURE.sub(figure, FORMULA.sub(formula, text))


def places(entries: Any) -> Iterator[str]:
    """Yield the pages of a part of `nav`, in order."""
    match entries:
        case str():
            yield entries
        case list() | dict():
            for entry in entries.values() if isinstance(entries, dict) else entries:
                yield from places(entry)


def packages() -> Iterator[tuple[str, str]]:
    """Yield the name and the first line of the docstring of each sub-package with a reference."""
    for path in sorted(SOURCE.glob("*/__init__.py")):
        text = ast.get_docstring(ast.parse(path.read_text("utf8")))
        if path.parent.name != "cli":  # these are in the page of the command line
            yield path.parent.name, (text or "").split("\n\n")[0].replace("\n", " ")


def public_names() -> list[str]:
    """Return the public names of the package, read without an import."""
    tree = ast.parse((SOURCE / "__init__.py").read_text("utf8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOME":
            return [*ast.literal_eval(node.value), "__version__"]
    raise AssertionError("no _HOME in bothways/__init__.py")


def reference() -> dict[str, str]:
    """Return the text of each page of the reference, by its place."""
    rows = "\n".join(f"| [{name}]({name}.md) | {text} |" for name, text in packages())
    blocks = "\n\n".join(f"::: bothways.{name}" for name in public_names())
    intro = (
        "# Python\n\nThe names of `import bothways`. Each is imported at first use. "
        "The [sub-packages](#sub-packages) are for extensions.\n\n"
    )
    pages = {
        "reference/index.md": f"{intro}{blocks}\n\n"
        f"## Sub-packages\n\n| package | subject |\n|---|---|\n{rows}\n",
        "reference/commands.md": commands(),
    }
    for name, _ in packages():
        block = f"::: bothways.{name}\n    options: {{show_submodules: true, heading_level: 1}}\n"
        pages[f"reference/{name}.md"] = block
    return pages


def commands() -> str:
    """Return the page of the command line, from the help of the commands."""
    from bothways.cli.main import app

    def example(heading: re.Match[str]) -> str:
        """Return the usage of a command, then the example that ends its help."""
        command = app
        for name in heading[1].split()[1:]:
            command = command[name]
        line = (command.help_epilogue or "").removeprefix("Example: ").strip("`")
        return f"{heading[0]}\n```bash\n{line}\n```\n" if line else heading[0]

    text = app.generate_docs(output_format="markdown", heading_level=1)
    _, *parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    kept = [part for part in parts if part.startswith("## bothways ") and "--install" not in part]
    head = "# Command line\n\nThe text of `bothways COMMAND --help`, for all commands.\n\n"
    # A default of a few lines would end the list.
    text = re.sub(r"\n {4}(?=\S)", " ", "".join(kept))
    return head + re.sub(r"^#+ (bothways .*)\n\n```console\n.*\n```\n", example, text, flags=re.M)


def guide_index(nav: list[dict[str, Any]], title: str) -> str:
    """Return the page that lists a guide's pages by group."""
    [entries] = [entry[title] for entry in nav if title in entry]
    home, *groups = entries
    parts = [f"# {title}"]
    for group in groups:
        [(name, pages)] = group.items()
        parts.append(f"## {name}")
        links = [next(iter(page.items())) for page in pages]
        parts.append(
            "\n".join(
                f"- [{text}]({posixpath.relpath(to, Path(home).parent)})" for text, to in links
            )
        )
    return "\n\n".join(parts) + "\n"


def generated(nav: list[dict[str, Any]]) -> dict[str, str]:
    """Return the text of each page that is not a file of `docs/`, by its place."""
    scripts = sorted((ROOT / "examples").glob("[0-9]*.py"))
    pages = {to: (ROOT / source).read_text("utf8") for source, to in OUTSIDE.items()}
    for script in scripts:
        text = script.read_text("utf8")
        pages[f"examples/{script.stem}.md"] = f"# {script.name}\n\n```python\n{text}```\n"
    pages["examples/index.md"] = re.sub(
        r"`((\d\w+)\.py)`", r"[\1](\2.py)", pages["examples/index.md"]
    )
    return pages | reference() | {
        "guide/index.md": guide_index(nav, "Guide"),
        "guide/zh/index.md": guide_index(nav, "指南"),
    }  # fmt: skip


def on_config(config: MkDocsConfig) -> None:
    """Add the pages of sub-packages and decisions to the navigation."""
    entries = {name: entry for part in config.nav or [] for name, entry in part.items()}
    modules = [{name: f"reference/{name}.md"} for name, _ in packages()]
    entries["Reference"].append({"Sub-packages": modules})
    records = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    entries["Project"][-1]["Decisions"] += [f"decisions/{path.name}" for path in records]
    scripts = sorted((ROOT / "examples").glob("[0-9]*.py"))
    [examples] = [entry for entry in entries["Project"] if "Examples" in entry]
    examples["Examples"] = [
        "examples/index.md", *({path.name: f"examples/{path.stem}.md"} for path in scripts)
    ]  # fmt: skip


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not files of `docs/`."""
    from mkdocs.structure.files import File, InclusionLevel

    for place, text in generated(config.nav or []).items():
        files.append(File.generated(config, place, content=text))
    for place, text in shown_files().items():
        level = InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, place, content=text, inclusion=level))
    for page in (ROOT / "docs" / "learn").rglob("*.md"):
        text, place = page.read_text("utf8"), page.relative_to(ROOT / "docs").with_suffix(".ipynb")
        if cells(text):
            content = notebook(text, page.parent)
            files.append(File.generated(config, place.as_posix(), content=content))
    files.append(File.generated(config, "favicon.svg", content=FAVICON))
    files.append(File.generated(config, "assets/iframe-worker.js", content=IFRAME_WORKER))
    return files


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """End the chain of next pages where the language changes."""
    for page in nav.pages:
        after = page.next_page
        if after is not None and chinese(after.file.src_uri) != chinese(page.file.src_uri):
            page.next_page = after.previous_page = None
    return nav


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Write a page for Python-Markdown, with links to pages of the site."""
    text = TRANSLATION.sub("", markdown, count=1)
    if page.file.src_uri.startswith("files/"):
        page.meta["common_mark"] = text
        return text
    if page.file.src_uri.startswith("learn/"):
        name = "下载为笔记本" if chinese(page.file.src_uri) else "Download as a notebook"
        if cells(text):
            link = f"[{name}]({Path(page.file.src_uri).stem}.ipynb)"
            text = re.sub(r"^(# .*)$", rf"\1\n\n{link}", text, count=1, flags=re.MULTILINE)
        text = drawn(text, (ROOT / "docs" / page.file.src_uri).parent)
    text = linked(text, page.file.src_uri)
    if page.file.src_uri.startswith("reference/"):  # found after the guide
        page.meta["search"] = {"boost": 0.5}
    page.meta["common_mark"] = text
    return indented(text)


def glossary(source: str) -> dict[str, tuple[str, str]]:
    """Return the anchor and meaning of each term of a glossary that is no everyday word."""
    own = chinese(source)
    distinctive = re.compile(r"[\u4e00-\u9fff]{4}" if own else r"\w[ -]\w|\w{10}")
    terms = {}
    for row in re.findall(
        r"^\| (\*\*.*) \|$", (ROOT / "docs" / source).read_text("utf8"), re.MULTILINE
    ):
        cells = row.split(" | ")
        term = re.split(r"[（；]", cells[1])[0] if own else cells[0].strip("*")
        if distinctive.search(term) and "**" not in term:  # else it has another meaning elsewhere
            meaning = re.sub(r"\]\([^)]*\)|[`*\[]", "", cells[-1])
            terms[term.lower()] = (slug(cells[0].split("**")[1]), escape(meaning))
    return terms


def slug(term: str) -> str:
    """Return the anchor of a term in the glossary."""
    return re.sub(r"\W", "-", term.lower())


def explained(page: str, terms: dict[str, tuple[str, str]], glossary_url: str) -> str:
    """Return a page in HTML whose first use of each term is a link that shows the meaning."""
    remaining, inside, parts = dict(terms), 0, []
    names = "|".join(re.escape(term) for term in sorted(terms, key=len, reverse=True))
    bound = r"\b" if names.isascii() else ""
    pattern = re.compile(rf"{bound}({names})s?{bound}", re.IGNORECASE)

    def link(match: re.Match[str]) -> str:
        if match[1].lower() not in remaining:
            return match[0]
        anchor, meaning = remaining.pop(match[1].lower())
        return f'<a class="term" href="{glossary_url}#{anchor}" title="{meaning}">{match[0]}</a>'

    for part in re.split(r"(<[^>]*>)", page):
        if element := re.match(r"<(/?)(?:a|code|pre|h\d|svg|math)\b", part):
            inside += -1 if element[1] else 1
        parts.append(part if inside or part.startswith("<") else pattern.sub(link, part))
    return "".join(parts)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str | None:
    """Link terms to the glossary, and warn of elements rendered otherwise than by CommonMark."""
    text = page.meta.pop("common_mark")
    if "\n::: " in f"\n{text}":
        return None
    wanted = COMMON_MARK.render(text)
    for tag, name in (("li", "items of lists"), ("table", "tables"), ("pre", "blocks of code")):
        counts = [len(re.findall(rf"<{tag}[ >]", source)) for source in (html, wanted)]
        # A block of code is a table with line numbers or not, and has one <pre>.
        if counts[0] != counts[1]:
            LOG.warning(
                "%s: %d %s, and %d in CommonMark", page.file.src_uri, counts[0], name, counts[1]
            )
    source = page.file.src_uri
    if source in GLOSSARIES:
        return re.sub(r"<td>(?=<strong>([^<]*))", lambda term: f'<td id="{slug(term[1])}">', html)
    if source.startswith(("guide/", "learn/")):
        name = GLOSSARIES[chinese(source)]
        url = files.src_uris[name].url_relative_to(page.file)
        return explained(html, glossary(name), url)
    return html


def origin(source: str) -> str:
    """Return the file of the repository that a page is made of."""
    if source.startswith("examples/") and source not in OUTSIDE.values():
        return source
    return {page: path for path, page in OUTSIDE.items()}.get(source, f"docs/{source}")


def linked(text: str, source: str) -> str:
    """Return a page with links from files and folders of the repository to pages of the site."""

    def replaced(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin(source)), match[2]))
        page = (OUTSIDE | FOLDERS).get(path, path.removeprefix("docs/"))
        if re.fullmatch(r"examples/\d\w+\.py", path):
            page = f"examples/{Path(path).stem}.md"
        elif page == path and not path.startswith("..") and (ROOT / path).exists():
            page = f"files/{path}.md"
        return match[1] + posixpath.relpath(page, posixpath.dirname(source) or ".") + match[3]

    parts = re.split(r"(^ *```.*?^ *```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if at % 2 else LINK.sub(replaced, part) for at, part in enumerate(parts))


def shown_files() -> dict[str, str]:
    """Return pages for files and folders that are linked and are no pages: what they hold."""
    pages = {}
    for path in [*(ROOT / "docs").rglob("*.md"), *(ROOT / source for source in OUTSIDE)]:
        name = str(path.relative_to(ROOT))
        source = OUTSIDE.get(name, name.removeprefix("docs/"))
        for target in LINK.findall(linked(path.read_text("utf8"), source)):
            page = posixpath.normpath(posixpath.join(posixpath.dirname(source), target[1]))
            if page.startswith("files/") and page not in pages:
                pages[page] = _contents(page.removeprefix("files/").removesuffix(".md"))
    return pages


def _contents(name: str) -> str:
    """Return the page of a file, or of all files in a folder."""
    place, parts = ROOT / name, [f"# {name}"]
    for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
        if file.is_file():
            heading = [] if file == place else [f"## {file.relative_to(place)}"]
            parts += [*heading, f"````\n{file.read_text('utf8').rstrip()}\n````"]
    return "\n\n".join(parts) + "\n"


def indented(text: str) -> str:
    """Return a text whose lists Python-Markdown reads as CommonMark does.

    The content of an item is indented by four columns for each level. An empty line is added before
    a list that follows a paragraph, and before an item that follows one of several paragraphs.
    """
    lines = text.split("\n")
    levels, offsets, apart = [0] * len(lines), [0] * len(lines), set[int]()
    spread = [False]  # whether the last item of each level has several paragraphs
    for token in COMMON_MARK.parse(text):
        begin, end = token.map or (0, 0)
        match token.type:
            case "bullet_list_open" | "ordered_list_open":
                spread.append(len(spread) == 1)
            case "bullet_list_close" | "ordered_list_close":
                spread.pop()
            case "list_item_open":
                if spread[-1]:
                    apart.add(begin)
                depth, spread[-1] = (
                    len(spread) - 1,
                    any(not line.strip() for line in lines[begin : end - 1]),
                )
                marker = re.match(r"(\s*)(?:[-*+]|\d+[.)])\s+", lines[begin])
                levels[begin], offsets[begin] = depth - 1, len(marker[1]) if marker else 0
                for at in range(begin + 1, end):
                    levels[at], offsets[at] = depth, len(marker[0]) if marker else 0
    result: list[str] = []
    for at, line in enumerate(lines):
        if at in apart and result and result[-1]:
            result.append("")
        held = len(line) - len(line.lstrip())
        result.append(" " * 4 * levels[at] + line[min(held, offsets[at]) :] if line.strip() else "")
    return "\n".join(result)


def on_page_context(
    context: dict[str, Any], page: Page, config: MkDocsConfig, nav: Navigation
) -> dict[str, Any]:
    """Give a page the navigation and the names of its language, and a link to its translation."""
    from mkdocs.structure.nav import Navigation as Part

    source, own = page.file.src_uri, chinese(page.file.src_uri)
    files = {each.file.src_uri: each for each in nav.pages}
    other = files.get(translation(source)) or files["index.md" if own else "zh/index.md"]
    config.theme["language"] = "zh" if own else "en"
    links = {own: page.url, not own: other.url}
    config.extra["alternate"] = [
        {"name": "English", "link": links[False], "lang": "en"},
        {"name": "中文", "link": links[True], "lang": "zh"},
    ]
    kept = []
    for item in nav.items:
        if item.title in SHARED:
            shared = copy.copy(item)
            shared.title = SHARED[item.title] if own else item.title
            kept.append(shared)
        elif chinese(next(_pages(item)).file.src_uri) == own:
            kept.append(item)
    part = Part(kept, nav.pages)
    part.homepage = files["zh/index.md" if own else "index.md"]
    context["nav"] = part
    return context


def _pages(item: Any) -> Iterator[Page]:
    """Yield the pages of an item of the navigation."""
    if item.children is None:
        yield item
    for child in item.children or ():
        yield from _pages(child)


def on_post_build(config: MkDocsConfig) -> None:
    """Warn of pages that load something from another host."""
    loading = re.compile(
        r"""<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=["']?(https?://[^"'> ]+)"""
    )
    for path in sorted(Path(config.site_dir).rglob("*.html")):
        for address in set(loading.findall(path.read_text("utf8"))):
            LOG.warning("%s loads %s", path.relative_to(config.site_dir), address)
