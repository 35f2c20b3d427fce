"""The files of a tokenizer, read and written as in transformers.

Besides `tokenizer.json` and `tokenizer_config.json` these are the older layouts: BERT's
`vocab.txt`, RoBERTa's and DeBERTa's `vocab.json` with `merges.txt`, and the SentencePiece files of
XLM-RoBERTa, ALBERT, BigBird and later DeBERTa versions. The score of ALBERT's pieces that end with
a comma after a digit is lowered by 100, as in its published `tokenizer.json`: Google's code splits
off that comma.

Notable choices. Truncation and padding of a file are disabled: they are explicit elsewhere. A
tokenizer without a post-processor gets [CLS] A [SEP] B [SEP], so that other programs add them. A
saved tokenizer is declared a `BertTokenizer` (or RoBERTa's, XLM-R's, ALBERT's, DeBERTa's,
BigBird's) only if transformers, which rebuilds these from vocabulary and settings, gets the same
tokenizer; else as the generic class, which uses `tokenizer.json` unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from bothways.core.advice import call
from bothways.core.errors import TokenizerError
from bothways.core.json_reader import check_regular, read_regular, read_utf8
from bothways.text.added_tokens import add_numbered, add_special
from bothways.text.hf_pipelines import (
    Albert,
    BigBird,
    ByteDeberta,
    PieceDeberta,
    Pipeline,
    Roberta,
    XlmRoberta,
    declaration,
    parts,
)
from bothways.text.reconcile import reconcile
from bothways.text.sentencepiece import read_sentencepiece
from bothways.text.special_tokens import (
    CONFIG,
    NAMES,
    SETTINGS,
    Specials,
    find_specials,
    flag,
    name_in,
    read_settings,
)

FILES = (
    "tokenizer.json", "vocab.txt", "vocab.json", "sentencepiece.bpe.model", "spiece.model",
    "spm.model",
)  # fmt: skip
"""The files that a tokenizer is read from: the first one in the folder."""

_ELSEWHERE = (
    "Give a folder with tokenizer.json: transformers writes one, "
    "AutoTokenizer.from_pretrained(…).save_pretrained(…)."
)

AGAIN = f"Download it again, or train one: {call('tokenizer train', 'FILES', out='FOLDER')}"
_MAX_GAPS = 2**20

LONGEST_WORD = 100
"""The length in characters above which a word is unknown; google-research/bert has 200."""


@dataclass(frozen=True)
class Bert:
    """BERT's normalisation.

    Attributes:
        strip_accents: None means as `lowercase`.
        cjk: surround ideographs with spaces.
    """

    lowercase: bool = True
    strip_accents: bool | None = None
    cjk: bool = True


def bert_backend(
    vocab: Mapping[str, int], bert: Bert, unknown: str = "[UNK]"
) -> tokenizers.Tokenizer:
    """Return the backend of transformers' BertTokenizer: WordPiece with BERT's normalisation."""
    model = models.WordPiece(dict(vocab), unk_token=unknown, max_input_chars_per_word=LONGEST_WORD)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bert.cjk,
        strip_accents=bert.strip_accents,
        lowercase=bert.lowercase,
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    return backend


def load_backend(path: Path) -> tuple[tokenizers.Tokenizer, Specials, bool]:
    """Load a folder, or one of `FILES`.

    Returns:
        The backend, its special tokens, and True if its inputs have no segments.

    Raises:
        TokenizerError: a file is missing or not a tokenizer, special tokens are missing, or an
            added token gets another id than the file lists.
        ResourceError: a file cannot be read.
    """
    file = _find(path)
    config = read_settings(file.with_name("special_tokens_map.json")) | read_settings(
        file.with_name(CONFIG)
    )
    backend, pipeline = _open(file, config)
    _check_ids(backend, file)
    add_numbered(backend, config, file)
    specials = find_specials(backend, config, file)
    if pipeline is not None:
        dress(backend, pipeline, specials)
        add_numbered(backend, config, file)  # again, because listed flags win over the pipeline's
    add_special(backend, config, file)
    names = config.get("model_input_names")
    return (
        finish(backend, specials),
        specials,
        isinstance(names, list) and "token_type_ids" not in names,
    )


def _check_ids(backend: tokenizers.Tokenizer, file: Path) -> None:
    """Refuse ids far beyond the number of tokens; `to_str` takes memory for every id up to them."""
    vocabulary = backend.get_vocab()
    largest = max(vocabulary.values(), default=-1)
    if largest >= len(vocabulary) + _MAX_GAPS:
        what = f"has ids up to {largest:,} for {len(vocabulary):,} tokens"
        raise TokenizerError(what, where=file, fix=AGAIN)


def dress(backend: tokenizers.Tokenizer, pipeline: Pipeline, specials: Specials) -> None:
    """Set the parts of a pipeline; [MASK] absorbs white space before it, except in PieceDeberta."""
    made = parts(pipeline, _ends(backend, specials))
    if made.normalizer is not None:
        backend.normalizer = made.normalizer
    backend.pre_tokenizer, backend.decoder = made.pre_tokenizer, made.decoder
    backend.post_processor = made.post_processor
    strips = not isinstance(pipeline, PieceDeberta)
    mask = tokenizers.AddedToken(
        backend.id_to_token(specials.mask), lstrip=strips, special=True, normalized=False
    )
    bigbird = isinstance(pipeline, BigBird) and backend.token_to_id("</s>") is not None
    ends = ("<s>", "</s>") if bigbird else ()
    backend.add_special_tokens([mask, *map(_special, ends)])


def _special(content: str | None) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(content, special=True, normalized=False)


def _ends(
    backend: tokenizers.Tokenizer, specials: Specials
) -> tuple[tuple[str, int], tuple[str, int]]:
    cls, sep = ((str(backend.id_to_token(id)), id) for id in (specials.cls, specials.sep))
    return cls, sep


def finish(backend: tokenizers.Tokenizer, specials: Specials) -> tokenizers.Tokenizer:
    """Mark special tokens, disable truncation and padding, and add a template if there is none."""
    contents = [backend.id_to_token(id) for id in asdict(specials).values()]
    known = {
        token.content for token in backend.get_added_tokens_decoder().values() if token.special
    }
    backend.add_special_tokens([_special(c) for c in contents if c not in known])
    backend.no_truncation()
    backend.no_padding()
    if backend.post_processor is None:
        cls, sep = backend.id_to_token(specials.cls), backend.id_to_token(specials.sep)
        backend.post_processor = processors.TemplateProcessing(
            single=f"{cls}:0 $A:0 {sep}:0",
            pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
            special_tokens=[(cls, specials.cls), (sep, specials.sep)],
        )
    return backend


def tokenizer_config(backend: tokenizers.Tokenizer, specials: Specials) -> dict[str, Any]:
    """Return the `tokenizer_config.json` with which transformers builds the same tokenizer."""
    names = {SETTINGS[use]: backend.id_to_token(id) for use, id in asdict(specials).items()}
    spec = json.loads(backend.to_str())
    added, known = {token["content"] for token in spec["added_tokens"]}, set(names.values())
    only, family = added == known, declaration(spec, _ends(backend, specials))
    match spec:
        case _ if family is not None and added == known | {
            family["bos_token"],
            family["eos_token"],
        }:
            return family | names
        case {
            "normalizer": {"type": "BertNormalizer", "clean_text": True} as normalizer,
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "model": {
                "type": "WordPiece",
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100,
            },
        } if only:
            return {
                "tokenizer_class": "BertTokenizer",
                "do_lower_case": normalizer["lowercase"],
                "strip_accents": normalizer["strip_accents"],
                "tokenize_chinese_chars": normalizer["handle_chinese_chars"],
                **names,
            }
        case _:
            return {"tokenizer_class": "PreTrainedTokenizerFast", **names}


def _find(path: Path) -> Path:
    if not path.exists():
        fix = "Give a folder, a tokenizer.json or a vocab.txt."
        raise TokenizerError("no such file or folder", where=path, fix=fix)
    if not path.is_dir():
        return path
    for name in FILES:
        if (path / name).exists():
            return path / name
    fix = (
        "Give a folder that bothways or transformers saved, or train one: "
        f"{call('tokenizer train', 'FILES', out='FOLDER')}"
    )
    what = f"the folder holds no tokenizer: none of {', '.join(FILES)}"
    raise TokenizerError(what, where=path, fix=fix)


def _open(file: Path, config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, Pipeline | None]:
    """Return the backend, and the pipeline to apply if the file does not contain one."""
    match file.suffix:
        case ".txt":
            return _from_vocabulary(file, config), None
        case ".model":
            return _from_pieces(file, config)
        case _ if file.name == "vocab.json":
            backend, prefix = _from_merges(file), flag(config, file, "add_prefix_space", False)
            byte_bert = backend.token_to_id("[CLS]") is not None
            return backend, ByteDeberta(prefix) if byte_bert else Roberta(
                prefix, flag(config, file, "trim_offsets", True)
            )
        case _:
            backend = _from_json(file)
            reconcile(backend, config, file)
            return backend, None


def _from_json(file: Path) -> tokenizers.Tokenizer:
    text = read_utf8(file, TokenizerError)
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises nothing narrower
        what = f"is not a tokenizer that tokenizers {tokenizers.__version__} can read: {error}"
        raise TokenizerError(what, where=file, fix="Fetch or train it again.") from error
    unknown = getattr(backend.model, "unk_token", None)
    if unknown is not None and backend.model.token_to_id(unknown) is None:
        what = f"the model's unknown token {unknown!r} is not in its vocabulary"
        raise TokenizerError(
            what, where=file, fix='Set "unk_token" under "model" to a token that is.'
        )
    return backend


def _from_vocabulary(file: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    lines = read_utf8(file, TokenizerError).removesuffix("\n").split("\n")
    bert = Bert(
        lowercase=flag(config, file, "do_lower_case", True),
        strip_accents=flag(config, file, "strip_accents", None),
        cjk=flag(config, file, "tokenize_chinese_chars", True),
    )
    vocab = {token: id for id, token in enumerate(lines)}
    return bert_backend(vocab, bert, name_in(config, SETTINGS["unknown"]) or "[UNK]")


def _from_merges(file: Path) -> tokenizers.Tokenizer:
    merges = file.with_name("merges.txt")
    if not merges.exists():
        what = "the folder has a vocab.json, but not its merges.txt"
        raise TokenizerError(
            what, where=file.parent, fix="Fetch merges.txt, or tokenizer.json, which holds both."
        )
    for each in (file, merges):
        check_regular(each, TokenizerError)
    try:
        return tokenizers.Tokenizer(models.BPE.from_file(str(file), str(merges)))
    except Exception as error:  # tokenizers raises nothing narrower
        what = f"is not a byte-level BPE vocabulary, or does not match merges.txt: {error}"
        raise TokenizerError(
            what, where=file, fix="Fetch both again, or tokenizer.json."
        ) from error


def _unigram(pieces: list[tuple[str, float]], unknown: int) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.Unigram(pieces, unk_id=unknown))


def _from_pieces(file: Path, config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, Pipeline]:
    """Read a SentencePiece file.

    XLM-R's vocabulary replaces the first three pieces by four tokens and appends <mask>:
    <unk> <s> </s> a b → <s> <pad> </s> <unk> a b <mask>.
    """
    content = read_regular(file, TokenizerError)
    try:
        held = read_sentencepiece(content)
    except ValueError as error:
        what = f"is not a SentencePiece model: {error}"
        raise TokenizerError(what, where=file, fix=_ELSEWHERE) from error
    pieces, prefix = list(held.pieces), flag(config, file, "add_prefix_space", True)
    if held.kind == "unigram" and file.name == "sentencepiece.bpe.model":
        uses = ("cls", "pad", "sep", "unknown", "mask")
        names = [name_in(config, SETTINGS[use]) or NAMES[use][1] for use in uses]
        pieces = [*((name, 0.0) for name in names[:4]), *pieces[3:], (names[4], 0.0)]
        return _unigram(pieces, 3), XlmRoberta(prefix, held.charsmap)
    places = {piece: id for id, (piece, _) in enumerate(pieces)}
    if held.kind == "unigram" and {"<unk>", "<s>", "[CLS]"} <= set(places):
        return _unigram(pieces, places["<unk>"]), BigBird(prefix, held.charsmap)
    if held.kind == "unigram" and {"<unk>", "[CLS]"} <= set(places):
        scored = [
            (piece, score - 100 if re.search(r"\d,$", piece) else score) for piece, score in pieces
        ]
        lowercase = flag(config, file, "do_lower_case", True)
        accents = flag(config, file, "keep_accents", False)
        albert = Albert(lowercase, accents, prefix, held.charsmap)
        return _unigram(scored, places["<unk>"]), albert
    if held.kind == "unigram" and {"[UNK]", "[CLS]"} <= set(places):
        mask = name_in(config, SETTINGS["mask"]) or NAMES["mask"][0]
        added = [] if mask in places else [(mask, 0.0)]
        lowercase = flag(config, file, "do_lower_case", False)
        punctuation = flag(config, file, "split_by_punct", False)
        deberta = PieceDeberta(lowercase, punctuation, prefix, held.charsmap)
        return _unigram([*pieces, *added], places["[UNK]"]), deberta
    what = (
        f"its {held.kind} pieces are neither ALBERT's, BigBird's or DeBERTa's, which have [CLS], "
        "nor XLM-RoBERTa's sentencepiece.bpe.model"
    )
    raise TokenizerError(what, where=file, fix=_ELSEWHERE)
