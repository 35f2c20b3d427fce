"""The files of a tokenizer, read and written as in transformers.

Besides `tokenizer.json` and `tokenizer_config.json` these are the older layouts: BERT's
`vocab.txt`, RoBERTa's and DeBERTa's `vocab.json` with `merges.txt`, and the SentencePiece files of
XLM-RoBERTa, ALBERT, BigBird and later DeBERTa versions. The score of ALBERT's pieces that end with
a comma after a digit is lowered by 100, as in its published `tokenizer.json`: Google's code splits
off that comma.

Notable choices. Truncation and padding of a file are disabled: they are explicit elsewhere. A
tokenizer without a post-processor gets [CLS] A [SEP] B [SEP], so that other programs add them. A
saved tokenizer is declared a `BertTokenizer` only if transformers, which rebuilds that class from
vocabulary and settings, gets the same tokenizer; else as the generic class, which uses
`tokenizer.json` unchanged.

SentencePiece's `.model` file (Kudo & Richardson 2018) is a Protocol Buffers message, of which three
fields are read; their numbers are those of `sentencepiece_model.proto` in google/sentencepiece.
"""

from __future__ import annotations

import json
import operator
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models

from bothways.core.config.values import is_integer
from bothways.core.errors import TokenizerError, call
from bothways.core.files import read_regular, read_utf8
from bothways.core.terminal import listed
from bothways.text import tokenizer_classes as classes
from bothways.text.protobuf import Fixed, fields
from bothways.text.template import AGAIN, foreign

FILES = (
    "tokenizer.json", "vocab.txt", "vocab.json", "sentencepiece.bpe.model", "spiece.model",
    "spm.model",
)  # fmt: skip
"""The files that a tokenizer is read from: the first one in the folder."""

_ELSEWHERE = (
    "Give a folder with tokenizer.json: transformers writes one, "
    "AutoTokenizer.from_pretrained(…).save_pretrained(…)."
)

_MAX_GAPS = 2**20
_MAX_EXPANSION = 1000

LONGEST_WORD = 100
"""Characters of the longest word that WordPiece reads; google-research/bert has 200."""

Opened = tuple[classes.Backend, classes.Pipeline | None]
"""A backend, and the pipeline to apply if its file does not contain one."""


def bert_backend(
    vocab: Mapping[str, int], pipeline: classes.Pipeline, unknown: str = "[UNK]"
) -> classes.Backend:
    """Return the backend of WordPiece with a pipeline, such as transformers' BertTokenizer."""
    model = models.WordPiece(dict(vocab), unk_token=unknown, max_input_chars_per_word=LONGEST_WORD)
    backend = classes.Backend(model)
    if pipeline.normalizer is not None:
        backend.normalizer = pipeline.normalizer
    backend.pre_tokenizer, backend.decoder = pipeline.pre_tokenizer, pipeline.decoder
    return backend


def load_backend(
    path: Path,
) -> tuple[classes.Backend, classes.Specials, bool, classes.JapaneseWords | None]:
    """Load a folder, or one of `FILES`.

    Returns:
        The backend, its special tokens, True if its inputs have no segments, and the division into
        Japanese words, if there is one.

    Raises:
        TokenizerError: a file is missing or not a tokenizer, special tokens are missing, several
            tokens have one id, the folder names a class that is not supported or that contradicts
            its files, or an added token gets another id than the file lists, or is the same text as
            another one.
        ResourceError: a file cannot be read.
    """
    if not path.exists():
        fix = "Give a folder, a tokenizer.json or a vocab.txt."
        raise TokenizerError("no such file or folder", where=path, fix=fix)
    folder = path if path.is_dir() else path.parent
    config = classes.read_settings(folder / classes.CONFIG)
    special_names = classes.read_settings(folder / "special_tokens_map.json")
    # As in transformers: the map has priority over a file from before tokens were listed by id.
    config = special_names | config if "added_tokens_decoder" in config else config | special_names
    named_class = classes.find_class(folder, config)
    file = _find(path, named_class) if path.is_dir() else path
    is_json = file.suffix.lower() not in (".txt", ".model") and file.name != "vocab.json"
    reads_file = named_class is not None and file.name in named_class.files
    tokenizer_class = named_class if reads_file else None
    is_japanese = tokenizer_class is not None and tokenizer_class.name == classes.JAPANESE
    words = classes.read_words(config, file) if is_japanese else None
    with foreign(file):
        # A tokenizer.json holds its pipeline; the other files get that of their class
        backend, pipeline = _open(file, config, tokenizer_class, words)
        cut = {"direction": "right", **(backend.truncation or {})}
        if str(config.get("truncation_side") or cut["direction"]).lower() != "right":
            message, fix = "cuts long texts at their beginning", 'Set "truncation_side" to "right".'
            raise TokenizerError(message, where=folder / classes.CONFIG, fix=fix)
        # `to_str` takes memory for every id up to the largest.
        vocabulary, growth = backend.get_vocab(), 1
        largest = max(vocabulary.values(), default=-1)
        if largest >= len(vocabulary) + _MAX_GAPS:
            message = f"has ids up to {largest:,} for {len(vocabulary):,} tokens"
            raise TokenizerError(message, where=file, fix=AGAIN)
        ids = Counter(backend.get_vocab(with_added_tokens=False).values())
        if repeated := [id for id, count in ids.items() if count > 1]:
            tokens = sorted(token for token, id in vocabulary.items() if id == min(repeated))
            message = f"gives the id {min(repeated)} to several tokens: {listed(tokens, 3)}"
            raise TokenizerError(message, where=file, fix=AGAIN)
        # A few kilobytes fill the memory by a normaliser that multiplies the text.
        for step in classes.steps_of(backend.normalizer):
            growth *= max(1, len(str(step.get("content", "") or step.get("prepend", ""))))
        if growth > _MAX_EXPANSION:
            message = f"its normaliser makes up to {growth:,} characters of one"
            raise TokenizerError(message, where=file, fix=AGAIN)
        add_numbered(backend, config, file)
        specials = classes.find_specials(backend, config, file)
        if is_json:
            classes.reconcile(backend, _ends(backend, specials), named_class, config, file)
        if pipeline is not None:
            dress(backend, pipeline, specials)
            add_numbered(backend, config, file)  # again: listed flags win over the pipeline's
        contents = _contents(backend)
        named = _special_tokens(config, file)
        backend.add_tokens([token for token in named if token.content not in contents])
        finish(backend, specials)
        _check_added(backend, file)
        backend.encode_batch_fast(list(classes.PROBES))  # finds a damaged table of normalisation
    names = config.get("model_input_names")
    flat = isinstance(names, list) and "token_type_ids" not in names
    return backend, specials, flat, words


def dress(backend: classes.Backend, pipeline: classes.Pipeline, specials: classes.Specials) -> None:
    """Set the parts of a pipeline, and mark its special tokens."""
    if pipeline.normalizer is not None:
        backend.normalizer = pipeline.normalizer
    backend.pre_tokenizer, backend.decoder = pipeline.pre_tokenizer, pipeline.decoder
    backend.post_processor = pipeline.around(_ends(backend, specials))
    mask = _special(backend.id_to_token(specials.mask), lstrip=pipeline.mask_strips)
    special = pipeline.special if backend.token_to_id("</s>") is not None else ()
    backend.add_special_tokens([mask, *map(_special, special)])


def _special(content: str | None, lstrip: bool = False) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(content, lstrip=lstrip, special=True, normalized=False)


def _ends(
    backend: classes.Backend, specials: classes.Specials
) -> tuple[tuple[str, int], tuple[str, int]]:
    cls, sep = ((str(backend.id_to_token(id)), id) for id in (specials.cls, specials.sep))
    return cls, sep


def finish(backend: classes.Backend, specials: classes.Specials) -> classes.Backend:
    """Mark special tokens, disable truncation, and add a template if there is none."""
    contents = [backend.id_to_token(id) for id in asdict(specials).values()]
    added = backend.get_added_tokens_decoder().values()
    special = {token.content for token in added if token.special}
    backend.add_special_tokens([_special(c) for c in contents if c not in special])
    backend.no_truncation()
    if backend.post_processor is None:
        backend.post_processor = classes.bert().around(_ends(backend, specials))
    return backend


def tokenizer_config(backend: classes.Backend, specials: classes.Specials) -> dict[str, Any]:
    """Return the `tokenizer_config.json` with which transformers builds the same tokenizer."""
    names = {classes.SETTINGS[use]: backend.id_to_token(id) for use, id in asdict(specials).items()}
    spec, post = json.loads(backend.to_str()), backend.post_processor
    added = {token["content"] for token in spec["added_tokens"]}
    bert = classes.bert().around(_ends(backend, specials))
    match spec:
        case {
            "normalizer": {"type": "BertNormalizer", "clean_text": True} as normalizer,
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "model": {
                "type": "WordPiece",
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100,
            },
        } if added == set(names.values()) and (
            post is None or classes.edges(backend, post) == classes.edges(backend, bert)
        ):
            return {
                "tokenizer_class": "BertTokenizer",
                "do_lower_case": normalizer["lowercase"],
                "strip_accents": normalizer["strip_accents"],
                "tokenize_chinese_chars": normalizer["handle_chinese_chars"],
                **names,
            }
        case _:
            # BigBird has both kinds of names, RoBERTa has these alone.
            ends = {"bos_token": "<s>", "eos_token": "</s>"} if {"<s>", "</s>"} <= added else {}
            # transformers 4 removes the space before a text unless it is told of it here, too.
            prefixed = (spec["pre_tokenizer"] or {}).get("add_prefix_space")
            space = {"add_prefix_space": True} if prefixed else {}
            return {"tokenizer_class": classes.GENERIC[0], **names, **ends, **space}


def _find(folder: Path, tokenizer_class: classes.TokenizerClass | None) -> Path:
    """Return the file that a tokenizer of this class is read from."""
    names = [name for name in FILES if (folder / name).exists()]
    if tokenizer_class is not None:
        class_files = [name for name in tokenizer_class.files if name in names]
        if tokenizer_class.name != classes.JAPANESE and "tokenizer.json" in names:
            class_files = ["tokenizer.json"]
        if class_files:
            return folder / class_files[0]
        if names:  # another class's, which would be read wrongly
            message = f"holds no vocabulary of {tokenizer_class.name}, its tokenizer class, but "
            message += ", ".join(names)
            class_files = ["tokenizer.json", *tokenizer_class.files]
            fix = f"Fetch {' or '.join(class_files)}, or name another class in {classes.CONFIG}, "
            fix += 'such as "tokenizer_class": "BertTokenizer" for vocab.txt.'
            raise TokenizerError(message, where=folder, fix=fix)
    if names[:1] == ["tokenizer.json"] or len(names) == 1:
        return folder / names[0]
    if names:
        message = f"holds several vocabularies, {', '.join(names)}, and does not name their class"
        fix = f'Name it in {classes.CONFIG}: "tokenizer_class": "BertTokenizer" for vocab.txt.'
        raise TokenizerError(message, where=folder, fix=fix)
    command = call("tokenizer train", "FILES", out="FOLDER")
    fix = f"Give a folder that bothways or transformers saved, or train one: {command}"
    if (folder / "model").is_dir():  # the folder of a run
        fix = f"Did you mean {folder / 'model'}?"
    message = f"the folder holds no tokenizer: none of {', '.join(FILES)}"
    raise TokenizerError(message, where=folder, fix=fix)


def _open(
    file: Path,
    config: Mapping[str, Any],
    tokenizer_class: classes.TokenizerClass | None,
    words: classes.JapaneseWords | None,
) -> Opened:
    """Return the backend, and the pipeline to apply if the file does not contain one.

    Args:
        tokenizer_class: the class of the folder, if it reads this file.
    """
    match file.suffix.lower():
        case ".txt":
            lines = read_utf8(file, TokenizerError).removesuffix("\n").split("\n")
            vocab = {token: id for id, token in enumerate(lines)}
            unknown = classes.name_in(config, classes.SETTINGS["unknown"]) or "[UNK]"
            if words is not None:
                return bert_backend(vocab, words.pipeline, unknown), None
            bert = (tokenizer_class or classes.CLASSES["BertTokenizer"]).pipeline(config, file)
            return bert_backend(vocab, bert, unknown), bert if bert.mask_strips else None
        case ".model":
            return _from_pieces(file, config, tokenizer_class)
        case _ if file.name == "vocab.json":
            return _from_merges(file, config, tokenizer_class)
        case _:
            backend = parse_backend(read_utf8(file, TokenizerError), file)
            backend.no_padding()  # before any text is encoded: to 10⁹ tokens would end the process
            dropout = getattr(backend.model, "dropout", None)
            if dropout:
                message = f"its BPE drops merges at random ({dropout:g}): ids differ each time"
                fix = 'Set "dropout" under "model" to null.'
                raise TokenizerError(message, where=file, fix=fix)
            token = getattr(backend.model, "unk_token", None)
            if token is not None and backend.model.token_to_id(token) is None:
                message = f"the model's unknown token {token!r} is not in its vocabulary"
                fix = 'Set "unk_token" under "model" to a token that is.'
                raise TokenizerError(message, where=file, fix=fix)
            return backend, None


def parse_backend(content: str, file: Path) -> classes.Backend:
    """Return the backend in the content of a `tokenizer.json`; errors as `load_backend`."""
    try:
        return classes.Backend.from_str(content)
    except Exception as error:  # tokenizers raises nothing narrower
        message = f"is not a tokenizer that tokenizers {tokenizers.__version__} can read: {error}"
        raise TokenizerError(message, where=file, fix="Fetch or train it again.") from error


def _from_merges(
    file: Path, config: Mapping[str, Any], tokenizer_class: classes.TokenizerClass | None
) -> Opened:
    merges = file.with_name("merges.txt")
    if not merges.exists():
        message = "the folder has a vocab.json, but not its merges.txt"
        fix = "Fetch merges.txt, or tokenizer.json, which holds both."
        raise TokenizerError(message, where=file.parent, fix=fix)
    ends = any(line.endswith("</w>") for line in read_utf8(merges, TokenizerError).splitlines())
    byte_bert = '"[CLS]"' in read_utf8(file, TokenizerError)
    default = "DebertaTokenizer" if byte_bert else "RobertaTokenizer"
    tokenizer_class = tokenizer_class or classes.CLASSES[default]
    pipeline = tokenizer_class.pipeline(config, file)
    if ends != (pipeline.suffix != ""):
        marks = "marks" if ends else "does not mark"
        message = f"{marks} the ends of words by </w>, unlike {tokenizer_class.name}, its class"
        fix = f'Name its class in {classes.CONFIG}: "tokenizer_class": "HerbertTokenizer" or '
        fix += '"OpenAIGPTTokenizer", which lower-cases, for </w>, "RobertaTokenizer" for bytes.'
        raise TokenizerError(message, where=merges, fix=fix)
    settings: dict[str, Any] = {}
    if ends:
        unknown = classes.name_in(config, classes.SETTINGS["unknown"]) or "<unk>"
        settings = {"end_of_word_suffix": "</w>", "unk_token": unknown}
    try:
        model = models.BPE.from_file(str(file), str(merges), **settings)
    except Exception as error:  # tokenizers raises nothing narrower
        message = f"is not a BPE vocabulary, or does not match merges.txt: {error}"
        fix = "Fetch both again, or tokenizer.json."
        raise TokenizerError(message, where=file, fix=fix) from error
    return classes.Backend(model), pipeline


def _from_pieces(
    file: Path, config: Mapping[str, Any], tokenizer_class: classes.TokenizerClass | None
) -> Opened:
    """Read a SentencePiece file.

    XLM-R's vocabulary replaces the first three pieces by four tokens and appends <mask>:
    <unk> <s> </s> a b → <s> <pad> </s> <unk> a b <mask>. CamemBERT's has five tokens instead of
    the first piece: <s>NOTUSED <pad> </s>NOTUSED <unk> <unk>NOTUSED <s> </s> a b <mask>.
    """
    content = read_regular(file, TokenizerError)
    try:
        pieces, kind, charsmap = _read_sentencepiece(content)
    except ValueError as error:
        message = f"is not a SentencePiece model: {error}"
        raise TokenizerError(message, where=file, fix=_ELSEWHERE) from error
    # The position of a piece in the file is its id
    ids = {piece: id for id, (piece, _) in enumerate(pieces)}
    name = ""
    if file.name == "sentencepiece.bpe.model":
        name = "XLMRobertaTokenizer"
    elif {"<unk>", "[CLS]"} <= ids.keys():
        name = "BigBirdTokenizer" if "<s>" in ids else "AlbertTokenizer"
    elif {"[UNK]", "[CLS]"} <= ids.keys():
        name = "DebertaV2Tokenizer"
    by_content = classes.CLASSES.get(name)
    tokenizer_class = tokenizer_class or by_content
    layouts = {tokenizer_class, by_content}
    shared_layouts = {classes.CLASSES["XLMRobertaTokenizer"], classes.CLASSES["CamembertTokenizer"]}
    differs = len(layouts) == 2 and layouts != shared_layouts
    if kind != "unigram" or tokenizer_class is None or by_content is None or differs:
        message = f"its {kind} pieces are neither ALBERT's, BigBird's or DeBERTa's, with [CLS], "
        message += "nor XLM-RoBERTa's or CamemBERT's sentencepiece.bpe.model"
        if tokenizer_class is not None:
            message += f"; {tokenizer_class.name} is the class of the folder"
        raise TokenizerError(message, where=file, fix=_ELSEWHERE)
    pipeline = tokenizer_class.pipeline(config, file, charsmap)
    names = {
        use: classes.name_in(config, classes.SETTINGS[use]) or classes.NAMES[use][1]
        for use in classes.NAMES
    }
    unknown, unused, mask = 3, list[str](), (names["mask"], 0.0)
    match tokenizer_class.name:
        case "XLMRobertaTokenizer":
            special_pieces = [(names[use], 0.0) for use in ("cls", "pad", "sep", "unknown")]
            pieces = [*special_pieces, *pieces[3:], mask]
        case "CamembertTokenizer":
            unused = ["<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED"]
            special_pieces = [(unused[0], 0.0), (names["pad"], 0.0), (unused[1], 0.0)]
            special_pieces += [(names["unknown"], 0.0), (unused[2], -100.0)]
            pieces = [*special_pieces, *pieces[1:], mask]
        case "BigBirdTokenizer":
            unknown = ids["<unk>"]
        case "AlbertTokenizer":
            unknown, comma = ids["<unk>"], re.compile(r"\d,$")
            pieces = [(p, score - 100 if comma.search(p) else score) for p, score in pieces]
        case _:
            unknown = ids["[UNK]"]
            added = classes.name_in(config, classes.SETTINGS["mask"]) or "[MASK]"
            pieces += [] if added in ids else [(added, 0.0)]
    backend = classes.Backend(models.Unigram(pieces, unk_id=unknown))
    backend.add_special_tokens([_special(piece) for piece in unused])
    return backend, pipeline


# Added tokens

NUMBERED, OLDER = "added_tokens_decoder", "added_tokens.json"
_EXTRA = ("extra_special_tokens", "additional_special_tokens")
_FLAGS = {"single_word", "lstrip", "rstrip", "normalized", "special"}


def add_numbered(backend: classes.Backend, config: Mapping[str, Any], file: Path) -> None:
    """Add the tokens that files next to `file` list with ids; flags in `added_tokens_decoder` win.

    Raises:
        TokenizerError: an entry is not a token with an id, or the token gets another id.
    """
    table, stated = config.get(NUMBERED), list[tuple[int, tokenizers.AddedToken]]()
    if table is None:
        location, contents = file.with_name(OLDER), _contents(backend)
        added = classes.read_settings(location)
        special = {token.content for token in _special_tokens(config, file)}
        for content, id in added.items():
            if type(id) is not int:
                message = f"gives the token {content!r} the id {id!r}"
                raise TokenizerError(message, where=location, fix="Give it a whole number.")
            # Text is normalised before ordinary tokens are looked for.
            flags = {"special": content in special, "normalized": content not in special}
            stated.append((id, tokenizers.AddedToken(content, **flags)))
    else:
        location, contents = file.with_name(classes.CONFIG), set()
        for id, entry in table.items() if isinstance(table, dict) else [("", table)]:
            token = _token(entry)
            if token is None or not is_integer(id):
                message = f"{NUMBERED!r} holds {entry!r} under {id!r}"
                fix = 'Write "ID": {"content": "TOKEN", "special": true} for each token.'
                raise TokenizerError(message, where=location, fix=fix)
            stated.append((int(id), token))
    stated.sort(key=operator.itemgetter(0))
    # In the order of their ids: the backend numbers new tokens itself, which is then checked.
    backend.add_tokens([token for _, token in stated if token.content not in contents])
    for id, token in stated:
        actual = backend.token_to_id(token.content)
        if actual != id:
            message = f"gives the token {token.content!r} the id {id}; the vocabulary has {actual}"
            fix = "Fetch the vocabulary that it goes with, or correct the id."
            raise TokenizerError(message, where=location, fix=fix)


def _check_added(backend: classes.Backend, file: Path) -> None:
    """Raise TokenizerError for added tokens that normalisation makes one text.

    The backend finds either of them, another one each time that it is loaded.
    """
    if backend.normalizer is None:
        return
    tokens = dict[str, str]()
    for token in backend.get_added_tokens_decoder().values():
        if not token.normalized:
            continue
        normal_form = backend.normalizer.normalize_str(token.content)
        other = tokens.setdefault(normal_form, token.content)
        if other != token.content:
            message = f"has the added tokens {other!r} and {token.content!r}, which its normaliser "
            message += f"makes one text, {normal_form!r}"
            fix = 'Set "normalized" to false for them, or remove one.'
            raise TokenizerError(message, where=file, fix=fix)


def _contents(backend: classes.Backend) -> set[str]:
    """Return the contents of the added tokens of a backend."""
    return {token.content for token in backend.get_added_tokens_decoder().values()}


def _special_tokens(config: Mapping[str, Any], file: Path) -> list[tokenizers.AddedToken]:
    """Return the special tokens with a use, `bos_token` and `eos_token` first, then the others."""
    entries = [
        config[key]
        for key in ("bos_token", "eos_token", *config)
        if key.endswith("_token") and classes.name_in(config, key)
    ]
    tokens = []
    extras: Any = next((config[key] for key in _EXTRA if config.get(key)), [])
    if isinstance(extras, dict):
        extras = [*extras.values()]  # of a table of names
    for entry in (*entries, *(extras if isinstance(extras, list) else [extras])):
        token = _token({"content": entry} if isinstance(entry, str) else entry, special=True)
        if token is None:
            message = f"names the special token {entry!r}"
            fix = 'Write "TOKEN", or {"content": "TOKEN"} with flags that are true or false.'
            raise TokenizerError(message, where=file.parent, fix=fix)
        tokens.append(token)
    return tokens


def _token(entry: Any, **extra_flags: bool) -> tokenizers.AddedToken | None:
    """Return the added token of an entry, with further flags; None if the entry is invalid."""
    match entry:
        case {"content": str(content), **settings}:
            flags = {name: value for name, value in settings.items() if name in _FLAGS}
            valid = all(isinstance(value, bool) for value in flags.values())
            return tokenizers.AddedToken(content, **(flags | extra_flags)) if valid else None
        case _:
            return None


_KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}


def _read_sentencepiece(content: bytes) -> tuple[list[tuple[str, float]], str, bytes | None]:
    """Return the pieces with their scores, the kind of the model, and its compiled normalisation.

    Raises:
        ValueError: the bytes are not the content of a `.model` file.
    """
    pieces = list[tuple[str, float]]()
    kind: Any = 1
    charsmap: Any = None
    for number, value in fields(content):
        if number > 3:
            continue
        message = dict(fields(value)) if isinstance(value, bytes) else {}
        if number == 1:
            text, score = message.get(1), message.get(2)
            if not isinstance(text, bytes) or not isinstance(score, Fixed | None):
                raise ValueError("a piece has no text, or its score is not a number")
            pieces.append((text.decode("utf-8"), 0.0 if score is None else score.real))
        elif number == 2:  # settings of the trainer
            kind = message.get(3, kind)
        elif number == 3:  # settings of the normaliser
            charsmap = message.get(2)
    if not pieces:
        raise ValueError("it holds no pieces")
    if kind not in _KINDS:
        raise ValueError(f"its model is of the unknown kind {kind}")
    return pieces, _KINDS[kind], charsmap if isinstance(charsmap, bytes) and charsmap else None
