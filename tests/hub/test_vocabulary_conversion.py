"""`bothways convert --vocabulary`: rows against hand-computed ones, ties, and transformers' view of the folder."""

import os
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from bothways.core.errors import ConfigError, FolderError, TokenizerError
from bothways.hub.convert.vocabulary import change_vocabulary, convert_vocabulary, plan_rows
from bothways.hub.model_folder import load_model, save_model
from bothways.model.config import EncoderConfig
from bothways.model.heads import MaskedHead, ReplacedHead
from bothways.model.model import Model
from bothways.model.positions import Learned
from bothways.text.tokenizer import Tokenizer
from bothways.text.trainers import ByteBPE, Unigram, WordPiece, train_vocabulary
from commands import run_line

WORDS = [
    "[PAD]", "[UNK]", "[unused0]", "[unused1]", "[CLS]", "[SEP]", "[MASK]", "an", "the", "was", "##fi",
    "##eld", "##s", "a", "##n", "##e", "##x", "x",
]  # fmt: skip
TABLE = "bert.embeddings.word_embeddings.weight"
BIAS = "cls.predictions.bias"
TEXT = "the an was x ans"


def folder_of(place: Path, *, tied: bool = True, rows: int = len(WORDS)) -> Path:
    """A BertForMaskedLM with a vocabulary of a few pieces, saved by transformers."""
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=rows, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=20, tie_word_embeddings=tied,
    )  # fmt: skip
    model = transformers.BertForMaskedLM(config)
    with torch.no_grad():
        model.cls.predictions.decoder.bias.normal_()
    model.save_pretrained(place)
    (place / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf8")
    Tokenizer.load(place / "vocab.txt").save(place)
    return place


def words_in(place: Path, *words: str) -> Path:
    place.write_text("\n".join(words) + "\n", encoding="utf8")
    return place


def logits(folder: Path, text: str) -> torch.Tensor:
    """The logits of transformers' model for transformers' own tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model, report = transformers.AutoModelForMaskedLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(report.values())
    with torch.no_grad():
        found: torch.Tensor = model.eval()(**tokenizer(text, return_tensors="pt")).logits[0]
    return found


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rows", [len(WORDS), 24])
def test_added_words_are_means_of_their_pieces_and_other_text_is_unchanged(
    tmp_path, tied, rows, capsys
):
    old = folder_of(tmp_path / "old", tied=tied, rows=rows)
    words = words_in(tmp_path / "words.txt", "Anfield", "", "the", "ansnsn", "Anfield")
    run_line("convert", old, "--out", tmp_path / "new", "--vocabulary", words)
    assert capsys.readouterr().out == "kept: 18 rows\nmean of pieces: 2 rows\n"
    before, after = (load_file(tmp_path / n / "model.safetensors") for n in ("old", "new"))
    assert len(after[TABLE]) == max(rows, 20)
    decoder = "cls.predictions.decoder."
    names = [TABLE, BIAS] if tied else [TABLE, f"{decoder}weight", f"{decoder}bias"]
    for name in names:
        assert torch.equal(after[name][:18], before[name][:18])
        anfield = (before[name][7] + before[name][10] + before[name][11]) / 3
        assert torch.allclose(after[name][18], anfield, atol=1e-7)
        # an ##s ##n ##s ##n: pieces that repeat count as often as they occur
        pieces = before[name][[7, 12, 14, 12, 14]]
        assert torch.allclose(after[name][19], pieces.mean(0), atol=1e-7)
        assert torch.equal(after[name][20:], before[name][20:])
    assert torch.equal(
        logits(tmp_path / "old", TEXT)[:, :18], logits(tmp_path / "new", TEXT)[:, :18]
    )
    table = (tmp_path / "new/vocabulary.tsv").read_text().splitlines()
    assert table[0] == "id\ttoken\tfate\tfrom"
    assert table[19] == "18\tanfield\tmean of pieces\tan 0.333, ##fi 0.333, ##eld 0.333"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    ours = Tokenizer.load(tmp_path / "new")
    for text in ("the Anfields was x", "anfield ansnsn"):
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text).tolist()
    assert [ours.token(id) for id in ours.encode("the Anfields")] == ["the", "anfield", "##s"]


def test_a_mark_of_the_byte_order_is_no_part_of_a_word(tmp_path):
    tokenizer = train_vocabulary(CORPUS, ByteBPE(290))
    (tmp_path / "words.txt").write_text("barnowl\r\nbarndog\r\n", encoding="utf-8-sig")
    change = change_vocabulary(tokenizer, tmp_path / "words.txt")
    assert [row.token for row in change.rows if row.fate != "kept"] == ["barnowl", "barndog"]


def test_a_word_that_is_an_entry_for_bytes_is_refused(tmp_path):
    """It would be encoded as that entry, with the row of other text."""
    words = words_in(tmp_path / "words.txt", "barnowl", "é")
    with pytest.raises(TokenizerError, match="entries for bytes: 'é'"):
        change_vocabulary(train_vocabulary(CORPUS, ByteBPE(290)), words)


def test_words_are_read_from_a_pipe(tmp_path):
    read, write = os.pipe()
    os.write(write, b"anfield\n")
    os.close(write)
    convert_vocabulary(folder_of(tmp_path / "old"), tmp_path / "new", f"/dev/fd/{read}")
    os.close(read)
    assert "anfield" in (tmp_path / "new/vocabulary.tsv").read_text()


def test_a_pooler_that_nothing_trained_stays_known_as_one(tmp_path):
    tokenizer = train_vocabulary(CORPUS * 5, WordPiece(60))
    save_model(tmp_path / "old", Model(EncoderConfig(60, 16, 1, 2, 24), ()), tokenizer)
    words = words_in(tmp_path / "words.txt", "nightbarn")
    convert_vocabulary(tmp_path / "old", tmp_path / "new", words)
    assert load_model(tmp_path / "new").untrained == ("pooler",)


def test_a_model_of_the_hub_is_fetched_and_named_in_the_card(tmp_path, monkeypatch):
    snapshot = folder_of(tmp_path / "4d7a")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(snapshot))
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: None)
    words = words_in(tmp_path / "words.txt", "Anfield")
    run_line("convert", "me/bert", "--out", tmp_path / "new", "--vocabulary", words)
    assert "me/bert, another vocabulary" in (tmp_path / "new/README.md").read_text()
    assert "anfield" in (tmp_path / "new/vocabulary.tsv").read_text()


def test_mistakes(tmp_path):
    old = folder_of(tmp_path / "old")
    for words, error, message in (
        (["the"], TokenizerError, "the vocabulary already has every word: 'the'"),
        ([], TokenizerError, "w.txt: there is no word"),
        (["new york"], ConfigError, "these are several words: 'new york'"),
        (["a" * 101], TokenizerError, "words of more than 100 characters stay unknown"),
        (["武侠"], ConfigError, "these are several words: '武侠'"),
    ):
        with pytest.raises(error, match=message):
            convert_vocabulary(old, tmp_path / "new", words_in(tmp_path / "w.txt", *words))
    with pytest.raises(FolderError, match="old: is a model folder already"):
        run_line("convert", old, "--out", tmp_path / "no")
    with pytest.raises(FolderError, match=r"none\.txt: no such file or folder\n  Give a text file"):
        convert_vocabulary(old, tmp_path / "new", tmp_path / "none.txt")


CORPUS = [
    "the dog sleeps near the barn and the dog eats",
    "an owl sings near the old barn at night",
]


@pytest.mark.parametrize(
    "old", [WordPiece(60), ByteBPE(290), Unigram(60)], ids=lambda k: type(k).__name__
)
@pytest.mark.parametrize(
    "new", [WordPiece(75), ByteBPE(300), Unigram(45)], ids=lambda k: type(k).__name__
)
def test_replaced_rows_follow_the_text_of_the_tokens(old, new):
    before = train_vocabulary(CORPUS * 5, old)
    after = train_vocabulary([*CORPUS * 3, "dogs and owls and barns sleep"] * 3, new)
    rows = plan_rows(before, after).rows
    assert [row.id for row in rows] == list(range(after.size))
    assert {row.fate for row in rows} <= {"kept", "mean of pieces", "random"}

    def text(tokenizer: Tokenizer, id: int) -> str:
        """Return what a token spells."""
        token = tokenizer.token(id)
        if tokenizer.kind == "BPE" and not tokenizer.special[id]:
            return tokenizer.backend.decoder.decode([token])
        return token.replace("##", "").replace("▁", " ")

    specials = dict(zip(vars(after.specials).values(), vars(before.specials).values(), strict=True))
    shared = 0
    for row in rows:
        assert row.fate == "random" or sum(w for _, w in row.sources) == pytest.approx(1)
        if row.id in specials:
            assert (row.fate, row.sources) == ("kept", ((specials[row.id], 1.0),))
        elif row.fate == "kept":
            shared += 1
            assert text(before, row.sources[0][0]).strip() == text(after, row.id).strip()
    assert shared > 10


def test_a_roberta_keeps_positions_when_its_padding_id_changes(tmp_path):
    torch.manual_seed(2)
    bpe = train_vocabulary(CORPUS * 5, ByteBPE(290))
    config = EncoderConfig(
        bpe.size, 16, 1, 2, 24, segments=0, pad=1, position=Learned(20, offset=2),
    )  # fmt: skip
    model = Model(config, (MaskedHead(),))
    save_model(tmp_path / "old", model, bpe)
    train_vocabulary(CORPUS * 5, WordPiece(60)).save(tmp_path / "tokenizer")
    convert_vocabulary(tmp_path / "old", tmp_path / "new", tmp_path / "tokenizer")
    made = load_model(tmp_path / "new").model
    assert made.config.position == Learned(20, offset=1)
    name = "encoder.embedding.position.weight"
    assert torch.equal(made.state_dict()[name][1:], model.state_dict()[name][2:])


def test_added_token_of_several_words_is_the_mean_of_their_pieces(tmp_path):
    old = Tokenizer.load(folder_of(tmp_path / "old"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "old")
    theirs.add_tokens(["an-xn"])  # of which "-" is unknown
    theirs.save_pretrained(tmp_path / "new")
    row = change_vocabulary(old, tmp_path / "new").rows[-1]
    assert (row.token, row.fate) == ("an-xn", "mean of pieces")
    assert {old.token(id): weight for id, weight in row.sources} == {
        "an": pytest.approx(1 / 3), "x": pytest.approx(1 / 3), "##n": pytest.approx(1 / 3)
    }  # fmt: skip


def test_words_behind_added_tokens_get_ids_of_their_own(tmp_path):
    old_folder = folder_of(tmp_path / "old", rows=len(WORDS) + 2)
    theirs = transformers.AutoTokenizer.from_pretrained(old_folder)
    theirs.add_tokens(["@USER", "<url>"])
    theirs.save_pretrained(old_folder)
    words = words_in(tmp_path / "words.txt", "anfield")
    change = convert_vocabulary(old_folder, tmp_path / "new", words)
    last = [(row.token, row.fate) for row in change.rows[-3:]]
    assert last == [("@USER", "kept"), ("<url>", "kept"), ("anfield", "mean of pieces")]
    tables = [load_file(tmp_path / name / "model.safetensors")[TABLE] for name in ("old", "new")]
    assert torch.equal(tables[1][:-1], tables[0])
    end = len(WORDS)
    for tokenizer in (Tokenizer.load(tmp_path / "new"), change.new):
        ids = tokenizer.encode(["the @user <url> Anfield anfields"])[0]
        assert ids[:4].tolist() == [WORDS.index("the"), end, end + 1, end + 2]
        assert end + 2 not in ids[4:]  # an added token is a whole word
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    assert theirs.encode("the Anfield", add_special_tokens=False) == [WORDS.index("the"), end + 2]


def test_word_behind_added_tokens_of_unigram_is_found_everywhere(tmp_path):
    train_vocabulary(CORPUS * 5, Unigram(60)).save(tmp_path / "old")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "old")
    theirs.add_tokens(["@USER"])
    theirs.save_pretrained(tmp_path / "old")
    old = Tokenizer.load(tmp_path / "old")
    new = change_vocabulary(old, words_in(tmp_path / "words.txt", "nightbarn")).new
    assert new.size == old.size + 1
    ids = new.encode(["nightbarn nightbarn, Nightbarn nightbarns"])[0].tolist()
    assert ids.count(old.size) == 3


@pytest.mark.parametrize("kind", [WordPiece(60), Unigram(60)], ids=lambda k: type(k).__name__)
def test_a_word_that_an_added_token_is_normalised_to_is_known(kind, tmp_path):
    """As an entry of its own, it would leave a folder that cannot be opened."""
    train_vocabulary(CORPUS * 5, kind).save(tmp_path / "old")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "old")
    theirs.add_tokens(["Zebra", "nightbarn"])
    theirs.save_pretrained(tmp_path / "old")
    old = Tokenizer.load(tmp_path / "old")
    with pytest.raises(TokenizerError, match="already has every word: 'zebra', 'nightbarn'"):
        change_vocabulary(old, words_in(tmp_path / "words.txt", "zebra", "nightbarn"))
    change = change_vocabulary(old, words_in(tmp_path / "words.txt", "zebra", "barndog"))
    change.new.save(tmp_path / "new")
    new = Tokenizer.load(tmp_path / "new")
    assert new.size == old.size + 1
    ids = new.encode(["zebra Zebra barndog"])[0].tolist()
    assert (ids.count(old.size - 2), ids.count(old.size)) == (2, 1)


def test_electra_and_its_generator_stay_tied(tmp_path, capsys):
    torch.manual_seed(2)
    tokenizer = train_vocabulary(CORPUS * 5, WordPiece(60))
    config = EncoderConfig(tokenizer.size, 16, 1, 2, 24)
    models = {
        "model": Model(config, (ReplacedHead(),)),
        "generator": Model(config, (MaskedHead(),)),
    }
    table = "encoder.embedding.token.weight"
    state = models["generator"].state_dict()
    state[table].copy_(models["model"].state_dict()[table])
    for role, model in models.items():
        save_model(tmp_path / "run" / role, model, tokenizer)
    words = words_in(tmp_path / "words.txt", "nightbarn", "日")
    change = convert_vocabulary(tmp_path / "run", tmp_path / "new", words)
    assert change.counts == {"kept": 60, "mean of pieces": 1, "random": 1}
    tables = [load_model(tmp_path / "new" / role).model.state_dict()[table] for role in models]
    assert torch.equal(*tables)
    assert len(tables[0]) == 62
    other = tmp_path / "other"
    (other / "step-1").mkdir(parents=True)
    with pytest.raises(FolderError, match="other: holds files of something other than a conv"):
        convert_vocabulary(tmp_path / "run", other, words)
    options = "--vocabulary", words, "--out"
    with pytest.raises(ConfigError, match=r"^part: "):
        run_line("convert", tmp_path / "run", *options, other, "--part", "generator")
    run_line("convert", tmp_path / "run", *options, tmp_path / "new")
    assert f"each row is in {tmp_path / 'new/model/vocabulary.tsv'}" in capsys.readouterr().err
