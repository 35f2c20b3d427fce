"""The tokenizer classes of transformers: which one a folder names, and whether its files are of it.

A folder names its class in `tokenizer_config.json`, in `config.json`, or by its model type, as for
`AutoTokenizer`. The generic class uses `tokenizer.json` unchanged; the others build the tokenizer
from vocabulary and settings. So a folder is read by its class, and `tokenizer.json` must do what
the class does: the same model, the same words of odd texts, the same special tokens around them.
A class that is not in `CLASSES` is refused by name.

Settings that contradict `tokenizer.json` are applied for BERT's and the byte-level classes, which
have always applied them. The SentencePiece classes do so since version 5 and used the file before:
it is unknown which of the two a model was trained with, so these contradictions are refused, and so
is a missing setting whose default contradicts the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import normalizers, pre_tokenizers, processors

from bothways.core.errors import TokenizerError
from bothways.text import hf_pipelines
from bothways.text.special_tokens import CONFIG, flag, read_settings

GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend", "PreTrainedTokenizer", "PythonBackend")
"""The names of transformers' class that uses `tokenizer.json` unchanged."""
JAPANESE = "BertJapaneseTokenizer"


@dataclass(frozen=True)
class TokenizerClass:
    """A class that builds a tokenizer from vocabulary and settings.

    Attributes:
        name: the class.
        model: the kind of model of its vocabulary.
        files: the vocabulary files that it reads, the preferred one first.
        build: builds its pipeline from the values of `settings`, or from those and `charsmap`.
        settings: the settings that it reads, with their defaults, in the order of `build`.
        pieces: whether it has SentencePiece's compiled normalisation.
        aliases: other names of the same class.
        models: the model types that have this class if a folder names none.
        template: whether the class has special tokens around texts.
        unknown: the id of the unknown token, where the class fixes it.
    """

    name: str
    model: str
    files: tuple[str, ...]
    build: Callable[..., hf_pipelines.Pipeline]
    settings: tuple[tuple[str, bool | None], ...] = ()
    pieces: bool = False
    aliases: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    template: bool = True
    unknown: int | None = None

    def pipeline(
        self, config: Mapping[str, Any], file: Path, charsmap: bytes | None = None
    ) -> hf_pipelines.Pipeline:
        """Return the pipeline of a folder's settings."""
        values = [flag(config, file, key, default) for key, default in self.settings]
        return self.build(*values, charsmap) if self.pieces else self.build(*values)


_WORDS = (("do_lower_case", True), ("strip_accents", None), ("tokenize_chinese_chars", True))
_BYTES, _PIECES = (("add_prefix_space", False),), (("add_prefix_space", True),)
_MERGES, _BPE_PIECES = ("vocab.json",), ("sentencepiece.bpe.model",)

_ALL = (
    TokenizerClass(
        "BertTokenizer", "WordPiece", ("vocab.txt",), hf_pipelines.Bert, _WORDS,
        aliases=(
            "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer", "LxmertTokenizer",
            "SqueezeBertTokenizer", "ConvBertTokenizer", "RetriBertTokenizer", "LayoutLMTokenizer",
            "RealmTokenizer", "DPRReaderTokenizer", "DPRQuestionEncoderTokenizer",
            "DPRContextEncoderTokenizer",
        ),
        models=(
            "bert", "convbert", "distilbert", "electra", "ernie", "layoutlm", "lxmert",
            "megatron-bert", "mobilebert", "nezha", "nomic_bert", "qdqbert", "retribert",
            "squeezebert",
        ),
    ),
    TokenizerClass(
        "MPNetTokenizer", "WordPiece", ("vocab.txt",),
        lambda *values: hf_pipelines.Bert(*values, roberta=True), _WORDS, models=("mpnet",),
    ),
    TokenizerClass(JAPANESE, "WordPiece", ("vocab.txt",), hf_pipelines.Bert),
    TokenizerClass(
        "RobertaTokenizer", "BPE", _MERGES, hf_pipelines.Roberta, (*_BYTES, ("trim_offsets", True)),
        aliases=(
            "BartTokenizer", "LEDTokenizer", "LongformerTokenizer", "MvpTokenizer",
        ),
        models=("data2vec-text", "ibert", "lilt", "longformer", "roberta", "roberta-prelayernorm"),
    ),
    TokenizerClass(
        "GPT2Tokenizer", "BPE", _MERGES, hf_pipelines.Roberta, (*_BYTES, ("trim_offsets", True)),
        models=("gpt2",), template=False,
    ),
    TokenizerClass(
        "DebertaTokenizer", "BPE", _MERGES, hf_pipelines.ByteDeberta, _BYTES, models=("deberta",)
    ),
    TokenizerClass(
        "HerbertTokenizer", "BPE", _MERGES, lambda: hf_pipelines.WordEnds(lowercase=False),
        models=("herbert",),
    ),
    TokenizerClass(
        "OpenAIGPTTokenizer", "BPE", _MERGES, lambda: hf_pipelines.WordEnds(lowercase=True),
        models=("openai-gpt",), template=False,
    ),
    TokenizerClass(
        "XLMRobertaTokenizer", "Unigram", _BPE_PIECES, hf_pipelines.XlmRoberta, _PIECES, True,
        models=("gte", "jina_embeddings_v3", "xlm-roberta", "xmod"), unknown=3,
    ),
    TokenizerClass(
        "CamembertTokenizer", "Unigram", _BPE_PIECES, hf_pipelines.XlmRoberta, _PIECES, True,
        models=("camembert",), unknown=3,
    ),
    TokenizerClass(
        "AlbertTokenizer", "Unigram", ("spiece.model",), hf_pipelines.Albert,
        (("do_lower_case", True), ("keep_accents", False), *_PIECES), True,
        aliases=("FNetTokenizer",), models=("albert", "fnet", "yoso"), unknown=1,
    ),
    TokenizerClass(
        "BigBirdTokenizer", "Unigram", ("spiece.model",), hf_pipelines.BigBird, _PIECES, True,
        models=("big_bird",),
    ),
    TokenizerClass(
        "DebertaV2Tokenizer", "Unigram", ("spm.model",), hf_pipelines.PieceDeberta,
        (("do_lower_case", False), ("split_by_punct", False), *_PIECES), True,
        models=("deberta-v2",),
    ),
)  # fmt: skip
CLASSES = {name: each for each in _ALL for name in (each.name, *each.aliases)}
"""The classes that are read here, by name without "Fast"."""
_OF_MODEL = {kind: each for each in _ALL for kind in each.models}
_GENERIC_MODELS = ("modernbert", "modernbert-decoder", "nystromformer", "xlm-roberta-xl")
"""Model types for which `AutoTokenizer` takes the generic class, whatever the folder names."""

_OF_JAPANESE = (
    "word_tokenizer_type", "subword_tokenizer_type", "mecab_kwargs", "sudachi_kwargs",
    "jumanpp_kwargs", "do_word_tokenize", "do_subword_tokenize",
)  # fmt: skip
_FOREIGN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_OF_JAPANESE[:5], (None,)), **dict.fromkeys(_OF_JAPANESE[5:], (None, True)),
    "do_basic_tokenize": (None, True), "never_split": (None, []),
    "split_special_tokens": (None, False),
}  # fmt: skip
"""Settings that divide text otherwise and that only other classes read, with the values without
effect."""
_OTHER_FILES = {
    "bpe.codes": "PhobertTokenizer and BertweetTokenizer",
    "entity_vocab.json": "LukeTokenizer",
    "vocab.bpe": "fairseq's BPE",
    "dict.txt": "fairseq's dictionary",
    "tokenizer.model": "LlamaTokenizer or tiktoken",
}
"""Vocabulary files of other algorithms."""

_UNCHANGED = (
    'If the model was trained with tokenizer.json as it is, set "tokenizer_class": '
    f'"{GENERIC[0]}" in {CONFIG}.'
)


@dataclass(frozen=True)
class Naming:
    """The tokenizer class of a folder.

    Attributes:
        known: the class; None if it is the generic one, or if the folder names none.
        explicit: whether a setting names it, rather than the model type.
    """

    known: TokenizerClass | None = None
    explicit: bool = False


def find_class(folder: Path, config: Mapping[str, Any]) -> Naming:
    """Find the class of a folder's tokenizer, as `AutoTokenizer` does.

    Raises:
        TokenizerError: the class is not supported, or a setting is of another class.
    """
    model = read_settings(folder / "config.json")
    kind, where = str(model.get("model_type")), folder / CONFIG
    named = config.get("tokenizer_class")
    if named is None and model.get("tokenizer_class") is not None:
        named, where = model["tokenizer_class"], folder / "config.json"
    default = _OF_MODEL.get(kind)
    if kind in _GENERIC_MODELS and (folder / "tokenizer.json").exists():
        return Naming()
    name = str(named).removesuffix("Fast") if named not in GENERIC else None
    if named is not None and name is not None and name not in CLASSES:
        what = f"the tokenizer class {named!r:.80} is not supported"
        fix = (
            f"Supported are {', '.join(each.name for each in _ALL)} and {GENERIC[0]}. {_UNCHANGED}"
        )
        raise TokenizerError(what, where=where, fix=fix)
    known = default if named is None else CLASSES.get(str(name))
    if known is None or known.name != JAPANESE:
        for key, neutral in _FOREIGN.items():
            if config.get(key) not in neutral:
                what = (
                    f"{key!r} is {config[key]!r:.60}, which {_title(known)}, "
                    "the tokenizer class of this folder, does not read"
                )
                fix = "If the model was trained without it, remove it."
                if key in _OF_JAPANESE:
                    fix = f'Set "tokenizer_class": "{JAPANESE}", or remove the setting.'
                raise TokenizerError(what, where=folder / CONFIG, fix=fix)
    if not (folder / "tokenizer.json").exists() and named is None:
        for name, owner in _OTHER_FILES.items():
            if (folder / name).exists():
                what = f"holds {name}, a file of {owner}, which is not supported"
                fix = f"If the model was trained without it, name its tokenizer_class in {CONFIG}."
                raise TokenizerError(what, where=folder, fix=fix)
    return Naming(known, explicit=named is not None)


def _title(known: TokenizerClass | None) -> str:
    return "the generic class" if known is None else known.name


def reconcile(
    backend: tokenizers.Tokenizer,
    ends: hf_pipelines.Ends,
    naming: Naming,
    config: Mapping[str, Any],
    file: Path,
) -> None:
    """Apply the settings to the backend of `tokenizer.json`, and compare it with its class.

    Raises:
        TokenizerError: a setting is neither true nor false or contradicts the file, or the file
            does not what the class does.
    """
    known = naming.known
    if known is None:
        if config.get("tokenizer_class") is None:  # a file alone: its settings count, if any
            _follow(backend, config, file)
        return
    kind = type(backend.model).__name__
    if kind != known.model:
        raise _mismatch(file, f"holds a {kind} model", known, f"builds {known.model}")
    _follow(backend, config, file)
    charsmap = hf_pipelines.charsmap_of(part_spec(backend.normalizer)) if known.pieces else None
    actual = settings_of(backend)
    for key, default in known.settings:
        value = actual.get(key)
        stated = flag(config, file, key, default)
        if key == "strip_accents" and stated is None:
            stated = flag(config, file, "do_lower_case", True)
        if value is None or value == stated:
            continue
        said = "not set, which means " if config.get(key) is None else ""
        what = f"{key!r} is {said}{json.dumps(stated)}, but {json.dumps(value)} in {file.name}"
        fix = f"Set it to {json.dumps(value)}, or name the class {GENERIC[0]}, to use the file."
        if known.pieces:
            fix = (
                f"Set it to {json.dumps(value)}, which transformers used before version 5; "
                "since then it uses the setting."
            )
        raise TokenizerError(what, where=file.with_name(CONFIG), fix=fix)
    pipelines = [known.pipeline(config, file, charsmap)]
    match pipelines[0]:
        case hf_pipelines.BigBird() | hf_pipelines.PieceDeberta() if charsmap is not None:
            pipelines.append(known.pipeline(config, file))
        case hf_pipelines.ByteDeberta(prefix):
            pipelines.append(hf_pipelines.ByteDeberta(prefix, doubled=True))
        case _:
            pass
    _compare(backend, [hf_pipelines.parts(pipeline, ends) for pipeline in pipelines], known, file)


def _follow(backend: tokenizers.Tokenizer, config: Mapping[str, Any], file: Path) -> None:
    """Apply settings that are stated, of BERT's and of byte-level tokenizers."""
    norm, cut, post = backend.normalizer, backend.pre_tokenizer, backend.post_processor
    if isinstance(norm, normalizers.BertNormalizer) and _kind(backend) == "WordPiece":
        norm.lowercase = flag(config, file, "do_lower_case", norm.lowercase)
        norm.handle_chinese_chars = flag(
            config, file, "tokenize_chinese_chars", norm.handle_chinese_chars
        )
        if "strip_accents" in config:  # null means as do_lower_case
            norm.strip_accents = flag(config, file, "strip_accents", None)
    if isinstance(cut, pre_tokenizers.ByteLevel) and _kind(backend) == "BPE":
        cut.add_prefix_space = flag(config, file, "add_prefix_space", cut.add_prefix_space)
        if isinstance(post, processors.RobertaProcessing):
            post.add_prefix_space = flag(config, file, "add_prefix_space", post.add_prefix_space)
            post.trim_offsets = flag(config, file, "trim_offsets", post.trim_offsets)


def _kind(backend: tokenizers.Tokenizer) -> str:
    return type(backend.model).__name__


def settings_of(backend: tokenizers.Tokenizer) -> dict[str, bool]:
    """Return the settings that the parts of a backend correspond to."""
    norm, cut = backend.normalizer, backend.pre_tokenizer
    match _kind(backend):
        case "WordPiece" if isinstance(norm, normalizers.BertNormalizer):
            strips = norm.lowercase if norm.strip_accents is None else norm.strip_accents
            return {
                "do_lower_case": norm.lowercase,
                "strip_accents": strips,
                "tokenize_chinese_chars": norm.handle_chinese_chars,
            }
        case "BPE" if isinstance(cut, pre_tokenizers.ByteLevel):
            return {"add_prefix_space": cut.add_prefix_space}
        case "Unigram":
            steps = {
                step["type"]: step
                for part in (norm, cut)
                for step in hf_pipelines.steps_of(part_spec(part))
            }
            return {
                "do_lower_case": "Lowercase" in steps,
                "keep_accents": "StripAccents" not in steps,
                "split_by_punct": "Punctuation" in steps,
                "add_prefix_space": steps.get("Metaspace", {}).get("prepend_scheme") == "always",
            }
        case _:
            return {}


PROBES = (
    "Hello, wORLD! it's (A-B) 3.14 $5 a_b #x ~y", " lead",
    "e\u0301 É ñ ß İı ſ ﬁ Å ①½ Ⅷ ＡＢ ｶﾞ", "中文字 かな 한글 \u1112\u1161 ไทย हिन्दी אבג مرحبا",
    "😀👩\u200d👩 \u200b\ufeff\ufffd", "\x00\x07\x7f", "``q'' “q” «q» …—‑", "𠀀\U0002b820",
)  # fmt: skip
"""Texts on which normalisers and pre-tokenizers differ."""
_BLANKS = (
    "a\x85b\x1cc",
    "in\tside\nline\u2028par\u00a0nbsp",
    "  two  spaces ",
    " a \n\n b  ",
    " ",
    "\t",
)


def _compare(
    backend: tokenizers.Tokenizer,
    choices: list[hf_pipelines.Parts],
    known: TokenizerClass,
    file: Path,
) -> None:
    """Refuse a `tokenizer.json` that divides odd texts otherwise than its class.

    Files of transformers 4 may keep blanks as words that the class, like SentencePiece, drops;
    there the class is followed.
    """
    _check_model(backend, known, file)
    actual = (backend.normalizer, backend.pre_tokenizer)
    for text in PROBES:
        words = _divide(*actual, text)
        if all(words != _divide(made.normalizer, made.pre_tokenizer, text) for made in choices):
            other = _divide(choices[0].normalizer, choices[0].pre_tokenizer, text)
            how = f"divides {text!r} into {words!r:.120}"
            raise _mismatch(file, how, known, f"into {other!r:.120}")
    for text in _BLANKS:
        words = _divide(*actual, text)
        if all(words != _divide(made.normalizer, made.pre_tokenizer, text) for made in choices):
            if not known.pieces:
                raise _mismatch(file, f"divides {text!r} into {words!r}", known, "otherwise")
            backend.pre_tokenizer = choices[0].pre_tokenizer
            break
    if known.template and backend.post_processor is not None:
        around = edges(backend, backend.post_processor)
        if all(around != edges(backend, made.post_processor) for made in choices):
            raise _mismatch(file, "puts other special tokens around texts", known, "has its own")


def edges(
    backend: tokenizers.Tokenizer, post: processors.PostProcessor
) -> list[tuple[list[int], list[int]]]:
    """Return the ids and segments of a text and of a pair after a post-processor."""
    before = backend.post_processor
    backend.post_processor = post
    rows = [backend.encode("a"), backend.encode("a", "b")]
    backend.post_processor = before
    return [(row.ids, row.type_ids) for row in rows]


def _check_model(backend: tokenizers.Tokenizer, known: TokenizerClass, file: Path) -> None:
    """Refuse settings of a model that its class does not have."""
    model = backend.model
    if known.model == "WordPiece":
        prefix, longest = model.continuing_subword_prefix, model.max_input_chars_per_word
        if prefix != "##" or longest != 100:
            how = f"marks tokens with {prefix!r} in words of up to {longest} characters"
            raise _mismatch(file, how, known, "with '##' up to 100")
    elif known.model == "BPE":
        suffix = model.end_of_word_suffix or ""
        expected = "" if known.build in (hf_pipelines.Roberta, hf_pipelines.ByteDeberta) else "</w>"
        if suffix != expected:
            how = f"marks the ends of words with {suffix!r}"
            raise _mismatch(file, how, known, f"with {expected!r}")
        if model.ignore_merges or model.byte_fallback:
            raise _mismatch(file, "goes round its merges", known, "uses them")
    elif known.unknown is not None:
        try:
            unknown = model.tokenize("\U0010fffd")[0].id
        except Exception:  # tokenizers raises nothing narrower for a model without an unknown token
            unknown = None
        if unknown != known.unknown:
            how = f"has the unknown token {unknown}"
            raise _mismatch(file, how, known, f"has {known.unknown}")


def _divide(
    norm: normalizers.Normalizer | None, cut: pre_tokenizers.PreTokenizer | None, text: str
) -> list[str]:
    normal = text if norm is None else norm.normalize_str(text)
    return [normal] if cut is None else [word for word, _ in cut.pre_tokenize_str(normal)]


def part_spec(part: Any) -> Mapping[str, Any] | None:
    """Return a normaliser or pre-tokenizer as `tokenizer.json` has it."""
    return None if part is None else json.loads(part.__getstate__())


def _mismatch(file: Path, how: str, known: TokenizerClass, other: str) -> TokenizerError:
    what = f"{how}; {known.name}, the tokenizer class of the folder, {other}"
    return TokenizerError(what, where=file, fix=_UNCHANGED)
