"""Pre-training a RoBERTa with byte-level BPE from the command line to transformers, and shapes that fit no class."""

import json
from pathlib import Path

import pytest
import torch

from bothways.core.batch import Batch, Layout
from bothways.core.errors import BothwaysError
from bothways.hub.model_folder import load_model
from bothways.model.families.catalogue import preset
from bothways.pretraining.build import fit_to_corpus
from bothways.tasks.masked_lm.task import vocabulary_logits
from bothways.text.tokenizer import Tokenizer
from bothways.text.trainers import ByteBPE, WordPiece, train_vocabulary
from commands import run_line
from toy_corpora import write_bytes

SMALL = [
    "encoder.depth=2", "encoder.width=32", "encoder.heads=2", "encoder.intermediate_size=64",
    "encoder.position.max_positions=64", "training.precision=fp32", "training.until=3 steps",
    "batch.n=512", "batch.kind=tokens", "phases.1.length=48", "phases.2.length=48",
    "evaluation_tokens=400", "held_out=0.1",
]  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    write_bytes(folder / "corpus")
    return folder


def run(home: Path, out: str, *words: str) -> Path:
    run_line("pretrain", home / "corpus", *words, *SMALL, "--device", "cpu", "--out", home / out)
    return home / out / "model"


@pytest.mark.parametrize("output", ["embedding", "own"])
def test_a_roberta_from_the_command_line_opens_in_transformers_with_equal_outputs(home, output):
    from transformers import AutoTokenizer, RobertaForMaskedLM

    words = f"--model roberta-base objective=masked_lm encoder.readout.output={output}".split()
    folder = run(home, f"roberta_{output}", *words)
    theirs, info = RobertaForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    matrix, table = theirs.lm_head.decoder.weight, theirs.get_input_embeddings().weight
    assert (matrix.data_ptr() == table.data_ptr()) == (output == "embedding")
    read, tokenizer = AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    assert theirs.config.pad_token_id == read.pad_token_id == tokenizer.specials.pad == 1
    sizes = theirs.config.max_position_embeddings, theirs.config.type_vocab_size
    assert (*sizes, read.model_max_length) == (66, 1, 64)

    texts = ["The cat sleeps in the<mask>.", "The owl sings."]
    rows = read(texts, padding=True, return_tensors="pt")
    assert rows["input_ids"][0].tolist() == tokenizer.backend.encode(texts[0]).ids
    model = load_model(folder).model
    with torch.no_grad():
        wanted = theirs.eval()(**rows).logits
        for row, kept, logits in zip(
            rows["input_ids"], rows["attention_mask"].bool(), wanted, strict=True
        ):
            ids = row[kept]
            batch = Batch(ids, torch.zeros_like(ids), Layout.of([len(ids)]))
            found = model(batch, heads=("masked",)).logits["masked"]
            assert torch.allclose(found, logits[kept], atol=1e-5)


def test_a_deberta_is_trained_with_its_decoder(home):
    """Masks are filled with it; transformers opens the folder without it, and encodes alike."""
    from transformers import DebertaForMaskedLM

    folder = run(home, "deberta", "--model", "deberta-base", "objective=masked_lm")
    theirs, info = DebertaForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    loaded = load_model(folder)
    assert loaded.model.heads["masked"].position.weight.shape == (64, 32)
    ids = torch.arange(5, 15)
    batch = Batch(ids, torch.zeros_like(ids), Layout.of([len(ids)]))
    with torch.no_grad():
        (found,) = vocabulary_logits(loaded.model, batch, torch.tensor([3]))
        plain = theirs.eval()(input_ids=ids[None]).logits[0, 3:4]
        last = loaded.model.encoder(batch).last
        wanted = theirs.deberta(input_ids=ids[None]).last_hidden_state[0]
    torch.testing.assert_close(last, wanted, rtol=0, atol=1e-5)
    assert float((found - plain).abs().max()) > 1e-4


def test_heads_that_no_class_has_are_refused_before_training(home):
    """RoBERTa and ELECTRA know no pairs; with RoBERTa's vocabulary there are none to make."""
    with pytest.raises(
        BothwaysError, match="no roberta class with the heads masked, pooler, pair"
    ) as caught:
        run(home, "pairs", "--model", "roberta-base")
    assert 'Set objective="masked_lm"' in str(caught.value)
    assert not (home / "pairs").exists()
    with pytest.raises(BothwaysError, match=r"this tokenizer has 4 special tokens there"):
        run(home, "bert", "--model", "bert-tiny")
    assert not (home / "bert").exists()


def test_a_shape_that_no_family_has_is_saved_as_our_own(home, capsys):
    folder = run(home, "odd", "--model", "bert-tiny", "objective=masked_lm", "encoder.segments=0")
    error = capsys.readouterr().err
    assert "note: encoder: no family of transformers has this" in error
    assert "bert, the nearest, has segments = 1" in error
    raw = json.loads((folder / "config.json").read_text())
    assert (raw["model_type"], raw["bothways"]["heads"]) == ("bothways", ["masked"])
    model = load_model(folder).model
    assert (model.config.segments, list(model.heads)) == (0, ["masked"])
    assert "transformers has no class for this model" in (folder / "README.md").read_text()


def test_a_shape_is_fitted_to_its_tokenizer(tokenizer):
    bytes_ = train_vocabulary(["a few words"], ByteBPE(300))
    for name in ("roberta-base", "bert-base", "albert-base-v2", "distilbert-base-uncased"):
        for made in (bytes_, tokenizer, train_vocabulary(["a few words"], WordPiece(100))):
            shape = fit_to_corpus(preset(name), made)
            assert (shape.vocab, shape.pad) == (made.size, made.specials.pad)
            assert shape.position.offset == (made.specials.pad + 1 if name == "roberta-base" else 0)
            assert shape.position.max_positions == 512
