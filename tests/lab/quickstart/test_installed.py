"""Installed documentation: read, never imported; prose, no code; the same on every run and with any number of processes."""

import textwrap
from pathlib import Path

import pytest

from bothways.lab import quickstart as installed_docs
from bothways.lab.quickstart import installed_documentation, prose

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

            async def wait(self):
                "Wait for the machine to end."

            def bare(self):
                return 1

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
def installation(tmp_path, monkeypatch) -> Path:
    """A small Python installation in place of the real one."""
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, bytes) else textwrap.dedent(content).encode()
        path.write_bytes(text)
    roots = [tmp_path / "lib", tmp_path / "site-packages"]
    monkeypatch.setattr(installed_docs, "_roots", lambda: roots)
    monkeypatch.setattr(installed_docs, "usable_cores", lambda: 1)
    return tmp_path


DOCUMENTS = {
    "alpha": ["The alpha module of the standard library."],
    "beta": ["The beta package does many things."],
    "beta.core": [
        "The core of the beta package.",
        "A machine that does the work.",
        "Help with the work that is to do.",
        "Run the machine at this speed.",
        "Wait for the machine to end.",
    ],
    "beta.latin": ["Le café est une boisson chaude."],
    "beta.warns": ["An escape that d Python warns about."],
    "zeta": ["A module that must not be run."],
}


def documents(**options: int) -> dict[str, list[str]]:
    return {
        document.where: document.text.split("\n") for document in installed_documentation(**options)
    }


def test_documents_are_modules_in_order(installation):
    assert documents() == DOCUMENTS
    assert list(documents()) == list(DOCUMENTS)


@pytest.mark.slow
def test_two_processes_read_the_same(installation, monkeypatch):
    monkeypatch.setattr(installed_docs, "usable_cores", lambda: 2)
    assert documents() == DOCUMENTS


def test_unreadable_files_are_skipped(installation, monkeypatch):
    def read(path: Path) -> bytes:
        if path.name == "closed.py":
            raise PermissionError(13, "Permission denied")
        with path.open("rb") as stream:
            return stream.read()

    (installation / "site-packages/gone.py").symlink_to("nowhere.py")
    (installation / "site-packages/closed.py").write_text('"""Nobody may read this file here."""')
    monkeypatch.setattr(Path, "read_bytes", read)
    assert documents() == DOCUMENTS


def test_paragraphs_come_once(installation):
    (installation / "site-packages/gamma.py").write_text(
        '"""The beta package does many things.\n\nBut this is new here."""'
    )
    (installation / "site-packages/delta.py").write_text('"""The beta package does many things."""')
    changed = documents()
    assert changed["gamma"] == ["But this is new here."]
    assert "delta" not in changed


def test_words_are_limited(installation, monkeypatch):
    assert list(documents(max_words=8)) == ["alpha", "beta"]
    monkeypatch.setattr(installed_docs, "_PACKAGE_WORDS", 8)
    assert list(documents()) == ["alpha", "beta", "beta.core", "zeta"]


def test_real_installation_has_prose_of_standard_library_and_packages():
    standard_library, *roots = installed_docs._roots()
    assert (standard_library / "textwrap.py").samefile(textwrap.__file__)
    assert roots
    standard = dict(installed_docs.read_package(Path(textwrap.__file__)))
    sentence = "Remove any common leading whitespace from every line in text."
    assert sentence in " ".join(standard["textwrap"])
    assert dict(installed_docs.read_package(Path(pytest.__file__).parent))["pytest"]


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("Wrapped text that\n    goes on.\n\n    And a second one.", ["Wrapped text that goes on.", "And a second one."]),
        ("Too short", []),
        ("x = foo(1) + bar[2] == 33 and all(q)", []),
        ("Add two numbers.\n\n>>> add(1, 2)\nthree is what comes\n\nThat is it.", ["Add two numbers.", "That is it."]),
        ("It is used so::\n\n    f(x) == [y, z]\n    g(x)\n\nThat is it.", ["It is used so:", "That is it."]),
        ("Title of it all\n===============\nThe text comes below.", ["Title of it all The text comes below."]),
        ("Parameters\n----------\nx, y : int\n    The first of them.", ["The first of them."]),
        ("Do it.\n\n:type x: some type of thing\n\n| a table | of words |", []),
        ("See :class:`~a.b.C`, ``code``, `link <http://x.y>`_ and **that**.", ["See ~a.b.C, code, link and that."]),
    ],
)  # fmt: skip
def test_prose(docstring, expected):
    assert prose(docstring) == expected
