"""Installed documentation: read, never imported; prose, no code; the same on every run and with any number of processes."""

from __future__ import annotations

import ast
import builtins
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bothways.lab.quickstart import installed_docs as installed
from bothways.lab.quickstart.installed_docs import installed_documentation
from bothways.lab.quickstart.prose import prose

GUARD = "raise SystemExit('a third party was executed')\n"
FILES = {
    "lib/alpha.py": '"""The alpha module of the standard library."""\n',
    "lib/site-packages/hidden.py": '"""It lies in a folder that is read by itself."""\n',
    "lib/test/test_alpha.py": '"""Tests do not document anything at all."""\n',
    "site-packages/zeta.py": f'"""A module that must not be run."""\n{GUARD}',
    "site-packages/beta/__init__.py": '"""The beta package does many things."""\n',
    "site-packages/beta/core.py": '''
        """The core of the beta package."""

        class Machine(Base):
            """A machine that does the work."""

            def run(self, speed: int = 3, *, loud=False, **rest) -> None:
                """Run the machine at this speed."""
                def inner():
                    """A function inside is not documentation."""

            async def wait(self):
                "Wait for the machine to end."

            def bare(self):
                return 1

        if True:
            def conditional(): """Not at the top of the module."""

        def helper(): r\'\'\'Help with the `work` that \\is to do.\'\'\'
    ''',
    "site-packages/beta/broken.py": '"""This is Python 2 and more."""\nprint "x"\n',
    "site-packages/beta/_vendor/copied.py": '"""A copy of what is elsewhere."""\n',
    "site-packages/beta/tests/helpers.py": '"""Tests again, and nothing but tests."""\n',
    "site-packages/beta/not-a-module.py": '"""Nobody can import this file here."""\n',
    "site-packages/beta/latin.py": b'# coding: latin-1\n"""Le caf\xe9 est une boisson chaude."""\n',
    "site-packages/beta/warns.py": '"""An escape that \\d Python warns about."""\n',
    "site-packages/beta/nothing.py": "x = 1\n",
}


@pytest.fixture
def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small Python installation in place of the real one."""
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(
            content if isinstance(content, bytes) else textwrap.dedent(content).encode()
        )
    monkeypatch.setattr(
        installed, "_roots", lambda: (tmp_path / "lib", [tmp_path / "site-packages"])
    )
    return tmp_path


def entries() -> list[tuple[str, str]]:
    modules = installed.installed_modules(10_000)
    return [entry for module in modules for entry in installed.docstrings_in(module)]


def test_docstrings_in_order(installation: Path) -> None:
    assert entries() == [
        ("alpha", "The alpha module of the standard library."),
        ("beta", "The beta package does many things."),
        ("beta.core", "The core of the beta package."),
        ("beta.core", "A machine that does the work."),
        ("beta.core", "Run the machine at this speed."),
        ("beta.core", "Wait for the machine to end."),
        ("beta.core", r"Help with the `work` that \is to do."),
        ("beta.latin", "Le café est une boisson chaude."),
        ("beta.warns", r"An escape that \d Python warns about."),
        ("zeta", "A module that must not be run."),
    ]


def test_files_that_cannot_be_read_are_passed_over(
    installation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path) -> bytes:
        if path.name == "closed.py":
            raise PermissionError(13, "Permission denied")
        with path.open("rb") as stream:
            return stream.read()

    before = entries()
    (installation / "site-packages/gone.py").symlink_to("nowhere.py")
    (installation / "site-packages/closed.py").write_text('"""Nobody may read this file here."""')
    monkeypatch.setattr(Path, "read_bytes", read)
    assert entries() == before


def test_where_the_real_installation_lies() -> None:
    standard, roots = installed._roots()
    assert (standard / "textwrap.py").samefile(textwrap.__file__)
    assert any(
        (root / "pytest" / "__init__.py").samefile(pytest.__file__)
        for root in roots
        if (root / "pytest").exists()
    )
    assert "textwrap" in {module.name for module in installed._modules_below(standard)}


def test_one_document_per_module_and_topic(installation: Path) -> None:
    documents = {document.where: document.text for document in installed_documentation(workers=1)}
    assert documents["beta.core"].split("\n") == [
        "The core of the beta package.",
        "A machine that does the work.",
        "Run the machine at this speed.",
        "Wait for the machine to end.",
        r"Help with the work that \is to do.",
    ]
    assert "assignment" in documents["topics assignment"]
    assert documents["builtins"].startswith(str(builtins.__doc__).split("\n", 1)[0] + "\n")
    assert "Return the absolute value of the argument." in documents["builtins"].split("\n")
    assert {"alpha", "beta", "beta.latin", "zeta", "sys"} <= documents.keys()
    assert (
        not {"hidden", "beta.broken", "beta.tests.helpers", "beta._vendor.copied", "beta.nothing"}
        & documents.keys()
    )


def test_a_paragraph_comes_once(installation: Path) -> None:
    (installation / "site-packages/gamma.py").write_text(
        '"""The beta package does many things.\n\nBut this is new here."""'
    )
    (installation / "site-packages/delta.py").write_text('"""The beta package does many things."""')
    documents = {document.where: document.text for document in installed_documentation(workers=1)}
    assert documents["gamma"] == "But this is new here."
    assert "delta" not in documents
    paragraphs = "\n".join(documents.values()).split("\n")
    assert len(paragraphs) == len(set(paragraphs))


def test_the_number_of_processes_changes_nothing(
    installation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "_BATCH_BYTES", 100)
    alone = list(installed_documentation(workers=1))
    assert list(installed_documentation(workers=2)) == alone


def test_it_stops_at_the_words_asked_for(installation: Path) -> None:
    for most in (1, 1000, 20000):
        counts = [
            len(document.text.split())
            for document in installed_documentation(max_words=most, workers=1)
        ]
        assert sum(counts) >= most > sum(counts[:-1])


def test_without_topics(installation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    documents = [document.where for document in installed_documentation(workers=1)]
    assert not [where for where in documents if where.startswith("topics ")]
    assert "builtins" in documents


def test_built_in_docstrings_are_those_of_the_interpreter() -> None:
    found = list(installed.built_in_docstrings())
    for thing in (str.join, len, dict, builtins):
        assert ("builtins", thing.__doc__) in found
    assert {where for where, _ in found} <= {"builtins", *sys.builtin_module_names}


@given(st.lists(st.integers(0, 50)), st.integers(-5, 300))
def test_the_fair_share_is_the_largest_that_fits(sizes: list[int], budget: int) -> None:
    share = installed._fair_share(sizes, budget)
    best = max(c for c in range(51) if sum(min(size, c) for size in sizes) <= max(budget, 0))
    assert [min(size, share) for size in sizes] == [min(size, best) for size in sizes]


def test_a_small_budget_takes_something_of_each_package(
    installation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "_SOURCE_BYTES_PER_WORD", 1)
    library = (installation / "lib/alpha.py").stat().st_size
    taken = {module.name for module in installed.installed_modules(library + 220)}
    assert "alpha" in taken
    assert {"beta", "zeta"} <= taken
    assert "beta.core" not in taken
    assert {module.name for module in installed.installed_modules(0)} == {"alpha"}


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("One line of text.", ["One line of text."]),
        (
            "Wrapped text that\n    goes on here.\n\n    And a second one.",
            ["Wrapped text that goes on here.", "And a second one."],
        ),
        ("Too short", []),
        ("x = foo(1) + bar[2] == 33 and all(q)", []),
        (
            "Add two numbers.\n\n>>> add(1, 2) is three of them\n3 is what comes\n\nThat is it.",
            ["Add two numbers.", "That is it."],
        ),
        (
            "It is used so::\n\n    call the function here\n    and here again\n\nThat is it.",
            ["It is used so:", "That is it."],
        ),
        (
            "Text before the code.\n\n```python\nsome code that looks fine\n```\nText after the code.",
            ["Text before the code.", "Text after the code."],
        ),
        ("Title of it all\n===============\n\nThe text comes below.", ["The text comes below."]),
        (
            "Do the thing.\n\nArgs:\n    x (int): The first of them.\n    y: The second of\n        the two.",
            ["Do the thing.", "The first of them.", "The second of the two."],
        ),
        (
            "Do the thing.\n\nParameters\n----------\nx, y : int\n    The first of them.\nz : str\n    The last of them.",
            ["Do the thing.", "The first of them.", "The last of them."],
        ),
        (
            "Do the thing.\n\n:param x: the first of them\n:type x: some type of thing\n:returns: the sum of all",
            ["Do the thing.", "the first of them", "the sum of all"],
        ),
        (
            ".. note::\n\n   This is worth knowing.\n\n.. versionadded:: 3.2\n   It was not there.\n\nThis stays in it.",
            ["This is worth knowing.", "This stays in it."],
        ),
        (
            "- the first of all\n- the second of all\n  goes on\n1. one more of these",
            ["the first of all", "the second of all goes on", "one more of these"],
        ),
        (
            "See :class:`~a.b.C`, ``code``, `link <http://x.y>`_ and *this* or **that** [1]_.",
            ["See a.b.C, code, link and this or that ."],
        ),
        ("See [the page](http://x.y/z) for it.", ["See the page for it."]),
        (
            "| a table | of words |\n| more of | the words |\n\nText below the table.",
            ["Text below the table."],
        ),
        (
            "==== ====\nsome words here\n==== ====\n\nText below the table.",
            ["Text below the table."],
        ),
    ],
)
def test_prose(docstring: str, expected: list[str]) -> None:
    assert prose(docstring) == expected


@given(st.text(st.sampled_from(" \n\tab:.`*_>|=-[]()<\\~0é数")))
def test_prose_of_anything_is_paragraphs_of_its_characters(docstring: str) -> None:
    found = prose(docstring)
    assert all(text == " ".join(text.split()) and text.count(" ") >= 2 for text in found)
    assert set("".join(found)) <= set(docstring) | {" "}


def test_prose_of_the_real_standard_library_is_mostly_words() -> None:
    source = Path(textwrap.__file__).read_bytes()
    docstrings: list[Any] = [
        ast.get_docstring(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
    ]
    text = " ".join(line for docstring in docstrings if docstring for line in prose(docstring))
    assert "Remove any common leading whitespace from every line in text." in text
    assert sum(c.isalpha() or c == " " for c in text) / len(text) > 0.9
