"""Another vocabulary for a model: words added, or all tokens replaced.

The rows of tokens that both vocabularies have are copied to the bit. A new token starts from the
mean of the rows of the pieces that it was split into. Everything with a row for each token changes
alike: the token embedding, the bias of the masked LM head and output matrices of their own. The
weights that two models share, as ELECTRA's, stay equal.

WordPiece and Unigram get a word as an entry of their model, so that it is found where words are
looked up: WordPiece takes the longest entry, and Unigram's new entry has a higher score than the
pieces that it replaces. Byte-level BPE has no entry without merges, which would change other words;
it gets an added token that matches whole words only.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import tokenizers
import torch
from torch import Tensor

from bothways.core.errors import ConfigError, FolderError, TokenizerError
from bothways.core.files import check_not_input, local_path, replace_text
from bothways.core.progress import SILENT, Progress
from bothways.core.terminal import listed
from bothways.data.text_io import read_lines
from bothways.hub.model_card import Card
from bothways.hub.model_folder import UNTRAINED, check_replaceable, load_model, save_model
from bothways.hub.resolve import resolve
from bothways.hub.sentence_transformers import kept_files
from bothways.model.config import with_vocabulary
from bothways.model.init import without_weights
from bothways.model.model import Model
from bothways.model.positions import Learned
from bothways.text.tokenizer import Tokenizer, byte_of, bytes_in, is_spaceless
from bothways.text.tokenizer_files import FILES

TABLE = "vocabulary.tsv"
"""The file in the new folder with the fate of each row."""

Fate = Literal["kept", "mean of pieces", "random"]


@dataclass(frozen=True)
class RowChange:
    """The origin of a row.

    Attributes:
        id, token: of the new vocabulary.
        sources: old ids with weights that add up to 1; empty for a random row.
    """

    id: int
    token: str
    fate: Fate
    sources: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class VocabularyChange:
    """A new tokenizer with the origin of each of its rows."""

    old: Tokenizer
    new: Tokenizer
    rows: tuple[RowChange, ...]

    @property
    def counts(self) -> dict[str, int]:
        """The number of rows of each fate."""
        return dict(Counter(row.fate for row in self.rows))

    def table(self) -> str:
        """Return a table with tabs: id, token, fate, and what the row was made of."""
        lines = ["id\ttoken\tfate\tfrom"]
        for row in self.rows:
            names = (f"{self.old.token(id)} {weight:.3g}" for id, weight in row.sources)
            origin = "" if row.fate == "kept" else ", ".join(names)
            lines.append(f"{row.id}\t{row.token}\t{row.fate}\t{origin}")
        return "\n".join(lines) + "\n"


def convert_vocabulary(
    source: str | Path, out: str | Path, vocabulary: str | Path, progress: Progress = SILENT
) -> VocabularyChange:
    """Save a model with another vocabulary; return what became of each row.

    Args:
        source: a model folder or a Hub id, or the folder of a run: its `generator/` is converted
            with `model/`.
        out: the new folder, with the table of the rows in `vocabulary.tsv`; of a run in `model/`.
        vocabulary: a text file with a word to add in each line; or a tokenizer (a folder,
            `tokenizer.json`, `vocab.txt` …) that replaces the old one.

    Raises:
        ConfigError: a line holds several words.
        FolderError, TokenizerError: a folder cannot be read, no word is new, or one is an entry for
            bytes.
    """
    folder_or_run, target, word_list = map(local_path, (source, out, vocabulary))
    check_not_input(target, [folder_or_run, word_list])
    if of_hub := not folder_or_run.exists():
        folder_or_run = resolve(source)
    inner = {role: folder_or_run / role for role in ("generator", "model")}
    folders = {role: inner[role] for role in inner if (inner[role] / "config.json").is_file()}
    if "model" not in folders or (folder_or_run / "config.json").exists():  # no run
        folders = {"": folder_or_run}
    else:  # `save_model` would replace the model of another run
        check_replaceable(target, [*inner], "a converted run")
    change: VocabularyChange | None = None
    for role, folder in folders.items():
        progress.stage(f"converting {role or 'the model'}")
        loaded = load_model(folder)
        if change is None:
            change = change_vocabulary(loaded.tokenizer, word_list)
        model = converted(loaded.model, change)
        counts = ", ".join(f"{fate}: {n:,}" for fate, n in change.counts.items())
        name = source if of_hub else loaded.folder.name
        summary = (
            f"{name} with another vocabulary, by `bothways convert --vocabulary`. "
            f"Rows: {counts}. Continue its pre-training before using it."
        )
        card = Card(f"{name}, another vocabulary", summary)
        untrained = {UNTRAINED: [*loaded.untrained]} if loaded.untrained else {}
        save_model(
            target / role, model, change.new, labels=loaded.labels, problem=loaded.problem,
            card=card, extra={**loaded.extra, **untrained},
            extra_files=kept_files(loaded.folder, model),
        )  # fmt: skip
        replace_text(target / role / TABLE, change.table())
    assert change is not None
    return change


def change_vocabulary(old: Tokenizer, word_list: Path) -> VocabularyChange:
    """Return the new tokenizer of a word list or a tokenizer, and the origin of its rows."""
    if word_list.is_dir() or word_list.name in FILES:
        return plan_rows(old, Tokenizer.load(word_list))
    if not word_list.exists():  # a pipe is not a regular file
        fix = "Give a text file with a word a line, or the folder of a tokenizer."
        raise FolderError("no such file or folder", where=word_list, fix=fix)
    lines = (line.strip() for _, line in read_lines(word_list))
    words = list(dict.fromkeys(line for line in lines if line))
    if not words:
        raise TokenizerError("there is no word", where=word_list, fix="Give one word a line.")
    return plan_rows(old, with_words(old, words))


def plan_rows(old: Tokenizer, new: Tokenizer) -> VocabularyChange:
    """Return the origin of each row of a new tokenizer."""
    uses = {getattr(new.specials, use): at for use, at in vars(old.specials).items()}
    forms: dict[Form, int] = {}  # the ids of all tokens by their form; of equal forms, the first
    for id in np.flatnonzero(old.named).tolist() if old.kind != new.kind else ():
        form = form_of(old, old.token(id))
        if form is not None:
            forms.setdefault(form, id)
    rows = list[RowChange]()
    # By its name an added token is found; its id's text may be normalised: @USER, but @user.
    added = {id: token.content for id, token in new.backend.get_added_tokens_decoder().items()}
    for id in np.flatnonzero(new.named).tolist():
        token = added.get(id) or new.token(id)
        form = form_of(new, token)
        old_id = uses.get(id)
        if old_id is None:
            old_id = forms.get(form) if form is not None and forms else old.id(token)
        if old_id is not None:
            rows.append(RowChange(id, token, "kept", ((old_id, 1.0),)))
        elif form is not None and (pieces := pieces_of(old, form)):
            # A piece that occurs twice counts twice in the mean.
            counts = Counter(pieces)
            sources = tuple((piece, n / len(pieces)) for piece, n in counts.items())
            rows.append(RowChange(id, token, "mean of pieces", sources))
        else:
            rows.append(RowChange(id, token, "random", ()))
    return VocabularyChange(old, new, tuple(rows))


def converted(model: Model, change: VocabularyChange) -> Model:
    """Return the model with rows for the new vocabulary.

    Rows that have no token, such as padding to a round number, stay as long as no token needs them.
    A row without any old piece is normal, with the mean and the standard deviation of the old rows
    in each dimension.
    """
    size = change.new.size
    kept_rows = [row for row in change.rows if row.fate == "kept"]
    if size == change.old.size or all(row.sources[0][0] == row.id for row in kept_rows):
        size = max(size, model.config.vocab)
    config = with_vocabulary(model.config, size, change.new.specials.pad)
    state = dict(model.state_dict())
    # A model with one token more shows which tensors have a row for each token.
    larger_config = with_vocabulary(model.config, model.config.vocab + 1, model.config.pad)
    with without_weights():
        larger = Model(larger_config, model.specification).state_dict()
    for name, tensor in model.state_dict().items():
        if tensor.shape != larger[name].shape:
            state[name] = _rows(tensor, change, size)
    # RoBERTa's position rows begin at an offset that follows from the padding id.
    old, new = model.config.position, config.position
    if isinstance(old, Learned) and isinstance(new, Learned) and old.offset != new.offset:
        name = "encoder.embedding.position.weight"
        unused, positions = state[name][: old.offset], state[name][old.offset :]
        # Rows below the offset are never read, but are part of the table's size.
        leading = positions.new_zeros(new.offset, positions.shape[1])
        leading[: len(unused)] = unused[: new.offset]
        state[name] = torch.cat([leading, positions])
    with without_weights():
        result = Model(config, model.specification)
    result.load_state_dict({name: tensor.clone() for name, tensor in state.items()}, assign=True)
    result.kept = model.kept
    return result.eval()


def _rows(old: Tensor, change: VocabularyChange, size: int) -> Tensor:
    """Return a tensor with a row for each new token."""
    # Sums in double precision: the mean of many pieces is exact in fp32.
    exact = old.double()
    draws = torch.Generator().manual_seed(0)
    named_rows = torch.from_numpy(np.flatnonzero(change.old.named))
    mean, spread = exact[named_rows].mean(0), exact[named_rows].std(0)
    result = old.new_zeros(size, *old.shape[1:])
    result[: len(old)] = old[:size]
    for row in change.rows:
        if row.fate == "kept":
            result[row.id] = old[row.sources[0][0]]
        elif row.fate == "random":
            noise = torch.randn(old.shape[1:], generator=draws, dtype=torch.float64)
            result[row.id] = (mean + spread * noise).to(old.dtype)
        else:
            ids, weights = zip(*row.sources, strict=True)
            factors = torch.tensor(weights, dtype=torch.float64)
            result[row.id] = torch.tensordot(factors, exact[list(ids)], 1).to(old.dtype)
    return result


_PREFERRED = 1e-3
"""The score of a new Unigram entry above the sum of its pieces' scores."""


class Form(NamedTuple):
    """A token without the marks of its vocabulary."""

    text: str
    begins: bool
    """True at the beginning of a word: "the", "Ġthe" and "▁the", not "##the"."""


def with_words(tokenizer: Tokenizer, words: Sequence[str]) -> Tokenizer:
    """Return the tokenizer with words appended to the vocabulary; known ones are skipped.

    Raises:
        ConfigError: a word consists of several words for this tokenizer.
        TokenizerError: no word is new, or one is an entry for bytes or too long to be read.
    """
    tokens, added = _new_tokens(tokenizer, words), list[tokenizers.AddedToken]()
    spec: dict[str, Any] = json.loads(tokenizer.backend.to_str())
    next_id = tokenizer.size
    vocabulary = spec["model"]["vocab"]
    match tokenizer.kind:
        # Behind added tokens there is no room for entries: tokenizers would number them anew.
        case "WordPiece" if all(token["content"] in vocabulary for token in spec["added_tokens"]):
            longest = spec["model"]["max_input_chars_per_word"]
            if unread := [token for token in tokens if len(token) > longest]:
                message = f"words of more than {longest} characters stay unknown: {listed(unread)}"
                raise TokenizerError(message, where="vocabulary", fix="Leave them out.")
            vocabulary |= {token: next_id + n for n, token in enumerate(tokens)}
        case "Unigram" if len(vocabulary) == next_id:
            # A new word wins over its pieces if its score is above the sum of theirs.
            scores = dict(map(tuple, vocabulary))
            lowest, split = min(scores.values()), tokenizer.backend.model.tokenize
            for token in tokens:
                score = sum(scores.get(piece.value, lowest) for piece in split(token))
                vocabulary.append([token, score + _PREFERRED])
        case _:
            for word in tokens:
                added.append(
                    tokenizers.AddedToken(
                        word.removeprefix("▁"), single_word=not is_spaceless(word), lstrip=True,
                        normalized=tokenizer.kind != "BPE",  # as `tokens` are
                    )
                )  # fmt: skip
    backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
    backend.add_tokens(added)
    return Tokenizer(backend, tokenizer.specials, tokenizer.flat, tokenizer.words)


def form_of(tokenizer: Tokenizer, token: str) -> Form | None:
    """Return a token without marks; None for special tokens and parts of characters."""
    id = tokenizer.id(token)
    if id is None or tokenizer.special[id] or id == tokenizer.specials.unknown:
        return None
    added = tokenizer.backend.get_added_tokens_decoder().values()
    if token in {added_token.content for added_token in added}:
        return Form(token, not is_spaceless(token))
    match tokenizer.kind:
        case "BPE" if (raw := bytes_in(token)) is not None:
            # A token that is part of a character loses bytes here and differs from itself: no form.
            text = raw.decode("utf-8", "ignore")
            return Form(text.lstrip(" "), text.startswith(" ")) if text.encode() == raw else None
        case "WordPiece":
            return Form(token.removeprefix("##"), not token.startswith("##"))
        case _:
            return Form(token.removeprefix("▁"), token.startswith("▁"))


def pieces_of(tokenizer: Tokenizer, form: Form) -> list[int]:
    """Return the ids that a vocabulary has for a form, without unknown ones.

    Example: "anfield" in BERT's vocabulary → those of an, ##field.
    """
    normalizer = tokenizer.backend.normalizer
    text = form.text if normalizer is None else normalizer.normalize_str(form.text)
    text = text.strip().strip("▁")
    match tokenizer.kind:
        case "WordPiece" if form.begins:  # an added token, such as e-mail, may be several words
            ids = tokenizer.encode([form.text])[0].tolist()
            return [id for id in ids if id != tokenizer.specials.unknown]
        case "BPE":
            characters = {byte: character for character, byte in byte_of().items()}
            raw = (" " if form.begins else "") + text
            marked = "".join(characters[byte] for byte in raw.encode())
        case "WordPiece":
            marked = f"##{text}"
        case _:
            marked = ("▁" if form.begins else "") + text
    if not text:
        return []
    ids = [token.id for token in tokenizer.backend.model.tokenize(marked)]
    return [id for id in ids if id != tokenizer.specials.unknown]


def _new_tokens(tokenizer: Tokenizer, words: Sequence[str]) -> list[str]:
    """Return words as entries of the vocabulary, without those that it has."""
    tokens, several, symbols = dict[str, None](), list[str](), list[str]()
    backend = tokenizer.backend
    normalize = str if backend.normalizer is None else backend.normalizer.normalize_str
    # Added tokens are found by normalised texts: a word zebra is Zebra in an uncased vocabulary.
    known = {
        normalize(token.content) if token.normalized else token.content
        for token in backend.get_added_tokens_decoder().values()
    }
    for word in words:
        if tokenizer.kind == "BPE":
            pieces = word.split()
        else:
            plain = normalize(word)
            cut = backend.pre_tokenizer
            pieces = [plain] if cut is None else [piece for piece, _ in cut.pre_tokenize_str(plain)]
            if tokenizer.kind == "Unigram" and is_spaceless(word):
                pieces = [piece.removeprefix("▁") for piece in pieces]
        if len(pieces) != 1:
            several.append(word)
        elif tokenizer.kind != "BPE" and tokenizer.id(pieces[0]) is None and plain not in known:
            tokens[pieces[0]] = None
        elif tokenizer.kind == "BPE" and len(tokenizer.encode(" " + word)) > 1:
            # "é" is the entry for the byte E9, with which other characters begin.
            if tokenizer.id(word) is None or bytes_in(word) == word.encode():
                tokens[word] = None
            else:
                symbols.append(word)
    if several:
        message = f"for this tokenizer these are several words: {listed(list(map(repr, several)))}"
        divides = "at white space, punctuation marks and, if it is BERT's, Chinese characters"
        fix = f"Give one word a line: it divides text {divides}."
        raise ConfigError(message, where="vocabulary", fix=fix)
    if symbols:
        message = f"the vocabulary has these entries for bytes: {listed(list(map(repr, symbols)))}"
        raise TokenizerError(message, where="vocabulary", fix="Leave them out.")
    if not tokens:
        message = f"the vocabulary already has every word: {listed(list(map(repr, words)))}"
        raise TokenizerError(message, where="vocabulary", fix="Give words that it splits.")
    return list(tokens)
