"""The tokenizer classes of transformers: their pipelines, and the class of a folder.

A folder names its class in `tokenizer_config.json`, in `config.json`, or by its model type, as for
`AutoTokenizer`. The generic class uses `tokenizer.json` unchanged; the others build the tokenizer
from vocabulary and settings. So a folder is read by its class, and `tokenizer.json` must do what
the class does: the same model, the same words of odd texts, the same special tokens around them.
A class that is not in `CLASSES` is refused by name.

Settings that contradict `tokenizer.json` are applied for BERT's and the byte-level classes, which
have always applied them. The SentencePiece classes do so since version 5 and used the file before:
it is unknown which of the two a model was trained with, so these contradictions are refused, and so
is a missing setting whose default contradicts the file.

Sources: RoBERTa: Liu et al. 2019 (bytes, after Radford et al. 2019); XLM-R: Conneau et al. 2020,
and ALBERT: Lan et al. 2019 (both pieces of Kudo 2018); DeBERTa: He et al. 2020 (bytes in version 1,
then pieces); BigBird: Zaheer et al. 2020 (pieces).

Notable choices. `<mask>`, and the [MASK] of ALBERT, BigBird and DeBERTa version 1, absorb the white
space before them, as in the published `tokenizer.json`. DeBERTa's authors write [CLS] A [SEP] B
[SEP] and normalise as SentencePiece does, and so do folders in the older layout here; transformers
5 puts a second [SEP] between texts in version 1, and uses its own normalisation in later versions.

Tohoku University's Japanese BERT divides text by MeCab (Kudo et al. 2004) with UniDic, after NFKC,
then into WordPiece or single characters. A divider in Python cannot be part of a `tokenizer.json`,
so it is kept with the backend, and the folder is saved in the layout of BertJapaneseTokenizer.
"""

from __future__ import annotations

import base64
import importlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers, processors

from bothways.core.errors import TokenizerError, call, optional
from bothways.core.files import read_object, surrogate_in

Backend = tokenizers.Tokenizer
Slice = tokenizers.NormalizedString
CONFIG = "tokenizer_config.json"

D = TypeVar("D", bound="bool | None")

NAMES: dict[str, tuple[str, ...]] = {
    "pad": ("[PAD]", "<pad>"),
    "unknown": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
}
"""The customary special tokens by use: BERT's, then RoBERTa's."""

SETTINGS = {use: f"{'unk' if use == 'unknown' else use}_token" for use in NAMES}
"""Their keys in `tokenizer_config.json`."""


@dataclass(frozen=True)
class Specials:
    """Ids of the tokens that every encoder needs."""

    pad: int
    unknown: int
    cls: int
    sep: int
    mask: int


def find_specials(backend: Backend, config: Mapping[str, Any], location: Path | str) -> Specials:
    """Find the special tokens that the configuration names, or else the customary ones.

    Raises:
        TokenizerError: special tokens are missing.
    """
    size = backend.get_vocab_size()
    if size < len(NAMES):
        message = f"the vocabulary has {size} tokens, fewer than the {len(NAMES)} special tokens"
        fix = f"Train one: {call('tokenizer train', 'FILES', out='FOLDER')}"
        raise TokenizerError(message, where=location, fix=fix)
    specials, missing = dict[str, int](), list[str]()
    for use, customary in NAMES.items():
        configured = name_in(config, SETTINGS[use])
        names = (configured,) if configured else customary
        ids = [id for name in names if (id := backend.token_to_id(name)) is not None]
        if ids:
            specials[use] = ids[0]
        else:
            missing.append(" or ".join(names))
    if missing:
        message = f"the vocabulary of {size} tokens lacks special tokens: {', '.join(missing)}"
        settings = ", ".join(SETTINGS.values())
        fix = f"Add them, or name those it has in tokenizer_config.json ({settings})."
        raise TokenizerError(message, where=location, fix=fix)
    return Specials(**specials)


def name_in(config: Mapping[str, Any], setting: str) -> str | None:
    """Return the special token of a setting, a text or a table; None if there is none."""
    match config.get(setting):
        case str(name) | {"content": str(name)}:
            return name
        case _:
            return None


def read_settings(file: Path) -> dict[str, Any]:
    """Return the object in `tokenizer_config.json` or a file like it; empty if there is no file.

    Raises:
        TokenizerError: it holds something else, or text that is not made of characters.
        ResourceError: it cannot be read.
    """
    if not file.exists():
        return {}
    settings = read_object(file, TokenizerError)
    half = surrogate_in(json.dumps(settings, ensure_ascii=False))
    if half is not None:
        raise TokenizerError(f"holds {half}", where=file, fix="Correct or remove it.")
    return settings


def flag(config: Mapping[str, Any], file: Path, key: str, default: D) -> bool | D:
    """Return a setting of the tokenizer in `file`; null means the default.

    Raises:
        TokenizerError: it is neither true nor false.
    """
    match config.get(key):
        case None:
            return default
        case bool(value):
            return value
        case value:
            location, fix = file.with_name(CONFIG), "Set it to true or to false, without quotes."
            raise TokenizerError(f"{key!r} is {value!r}", where=location, fix=fix)


# Pipelines

ALONE = "{cls} $A {sep}"
PAIR = "{cls} $A {sep} {sep} $B {sep}"
PAIR_OF_SEGMENTS = "{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1"

Ends = tuple[tuple[str, int], tuple[str, int]]
"""The token that begins an input and the one that ends it: (token, id) each."""


def _template(pair: str, ends: Ends) -> processors.PostProcessor:
    (cls, _), (sep, _) = ends
    forms = [form.format(cls=cls, sep=sep).split() for form in (ALONE, pair)]
    return processors.TemplateProcessing(*forms, special_tokens=list(dict.fromkeys(ends)))


_AROUND, _AROUND_SEGMENTS = (partial(_template, form) for form in (PAIR, PAIR_OF_SEGMENTS))


@dataclass(frozen=True)
class Pipeline:
    """The parts of a `tokenizers.Tokenizer` around its model.

    Attributes:
        around: builds the post-processor that puts special tokens around texts.
        mask_strips: whether [MASK] absorbs the white space before it.
        suffix: the mark at the end of a word, in its last token.
        special: tokens that stay special, though no text has them.
    """

    normalizer: normalizers.Normalizer | None
    pre_tokenizer: pre_tokenizers.PreTokenizer
    decoder: decoders.Decoder
    around: Callable[[Ends], processors.PostProcessor] = _AROUND_SEGMENTS
    mask_strips: bool = True
    suffix: str = ""
    special: tuple[str, ...] = ()


def bert(lowercase: bool = True, strip_accents: bool | None = None, cjk: bool = True) -> Pipeline:
    """Return the pipeline of WordPiece with BERT's normalisation.

    Args:
        strip_accents: None means as `lowercase`.
        cjk: surround ideographs with spaces.
    """
    norm = normalizers.BertNormalizer(True, cjk, strip_accents, lowercase)
    words, decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(prefix="##")
    return Pipeline(norm, words, decoder, mask_strips=False)


def word_ends(lowercase: bool) -> Pipeline:
    """Return the pipeline of BPE over BERT's words, with "</w>" at their ends: GPT, HerBERT."""
    words = bert(lowercase, None if lowercase else False)
    return replace(words, decoder=decoders.BPEDecoder(suffix="</w>"), suffix="</w>")


def roberta(prefix_space: bool = False, trim_offsets: bool = True) -> Pipeline:
    """Return the pipeline of byte-level BPE; `prefix_space` puts a space before the first word."""

    def around(ends: Ends) -> processors.PostProcessor:
        cls, sep = ends
        return processors.RobertaProcessing(sep, cls, trim_offsets, prefix_space)

    return Pipeline(None, pre_tokenizers.ByteLevel(prefix_space), decoders.ByteLevel(), around)


def byte_deberta(prefix_space: bool = False) -> Pipeline:
    """Return the pipeline of byte-level BPE with BERT's special tokens."""
    return Pipeline(None, pre_tokenizers.ByteLevel(prefix_space), decoders.ByteLevel())


def _pieces(
    prefix_space: bool,
    steps: list[normalizers.Normalizer],
    *cuts: pre_tokenizers.PreTokenizer,
    unprefixed: str = "never",
) -> Pipeline:
    """Return the pipeline of Unigram with `cuts` before spaces become "▁"."""
    scheme = "always" if prefix_space else unprefixed
    spaces = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme)
    decoder = decoders.Metaspace("▁", prepend_scheme=scheme)
    cut = pre_tokenizers.Sequence([*cuts, spaces])
    return Pipeline(normalizers.Sequence(steps), cut, decoder)


def _compiled(charsmap: bytes | None) -> list[normalizers.Normalizer]:
    """Return SentencePiece's normalisation, compiled; empty if there is none."""
    return [] if charsmap is None else [normalizers.Precompiled(charsmap)]


def xlm_roberta(prefix_space: bool = True, charsmap: bytes | None = None) -> Pipeline:
    """Return the pipeline of Unigram over words after "▁"."""
    pieces = _pieces(prefix_space, [], pre_tokenizers.WhitespaceSplit())
    return replace(pieces, normalizer=next(iter(_compiled(charsmap)), None), around=_AROUND)


def albert(
    lowercase: bool = True,
    keep_accents: bool = False,
    prefix_space: bool = True,
    charsmap: bytes | None = None,
) -> Pipeline:
    """Return XLM-RoBERTa's pipeline after English normalisation: uniform quotes, no accents."""
    quotes = [normalizers.Replace(mark, '"') for mark in ("``", "''")]
    steps: list[normalizers.Normalizer] = [*quotes]
    steps += [] if keep_accents else [normalizers.NFKD(), normalizers.StripAccents()]
    steps += [normalizers.Lowercase()] if lowercase else []
    return _pieces(prefix_space, steps + _compiled(charsmap), pre_tokenizers.WhitespaceSplit())


def piece_deberta(
    lowercase: bool = False,
    split_punctuation: bool = False,
    prefix_space: bool = True,
    charsmap: bytes | None = None,
) -> Pipeline:
    """Return the pipeline of Unigram over whole texts.

    Args:
        split_punctuation: split off each punctuation mark.
        charsmap: SentencePiece's compiled normalisation; None for that of transformers 5: white
            space becomes spaces, NFC, no white space at the end.
    """
    steps: list[normalizers.Normalizer] = [normalizers.Lowercase()] if lowercase else []
    if charsmap is None:
        white = normalizers.Replace(tokenizers.Regex(r"\s{2,}|[\n\r\t]"), " ")
        steps += [white, normalizers.NFC(), normalizers.Strip(left=False, right=True)]
    else:
        joined = normalizers.Replace(tokenizers.Regex(" {2,}"), " ")
        steps += [normalizers.Strip(), *_compiled(charsmap), joined]
    cuts = [pre_tokenizers.Punctuation("isolated")] if split_punctuation else []
    return replace(_pieces(prefix_space, steps, *cuts, unprefixed="first"), mask_strips=False)


def big_bird(prefix_space: bool = True, charsmap: bytes | None = None) -> Pipeline:
    """Return the pipeline of Unigram over words after "▁", with BERT's special tokens.

    Args:
        charsmap: SentencePiece's compiled normalisation; None for that of transformers 5, which
            only joins spaces.
    """
    steps = _compiled(charsmap) or [normalizers.Strip(left=False, right=False)]
    pieces = _pieces(prefix_space, [*steps, normalizers.Replace(tokenizers.Regex(" {2,}"), "▁")])
    scheme = "always" if prefix_space else "never"
    spaces = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme)
    # Its own ends stay special, though [CLS] and [SEP] surround its texts.
    return replace(pieces, pre_tokenizer=spaces, special=("<s>", "</s>"))


def steps_of(component: Any) -> list[Mapping[str, Any]]:
    """Return the single steps of a normaliser or pre-tokenizer, as `tokenizer.json` has them."""
    specs, steps = [] if component is None else [json.loads(component.__getstate__())], []
    while specs:
        spec = specs.pop(0)
        if spec["type"] == "Sequence":
            specs[:0] = spec.get("normalizers") or spec.get("pretokenizers") or ()
        else:
            steps.append(spec)
    return steps


# Classes

GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend", "PreTrainedTokenizer", "PythonBackend")
"""The names of transformers' class that uses `tokenizer.json` unchanged."""
JAPANESE = "BertJapaneseTokenizer"


@dataclass(frozen=True)
class TokenizerClass:
    """A class that builds a tokenizer from vocabulary and settings.

    Attributes:
        model: the kind of model of its vocabulary.
        files: the vocabulary files that it reads, the preferred one first.
        build: builds its pipeline from the values of `settings`; of a Unigram model, also from
            SentencePiece's compiled normalisation.
        settings: the settings that it reads, with their defaults, in the order of `build`.
        models: the model types that have this class if a folder names none.
        template: whether the class has special tokens around texts.
        unknown: the id of the unknown token, where the class fixes it.
    """

    name: str
    model: str
    files: tuple[str, ...]
    build: Callable[..., Pipeline]
    settings: tuple[tuple[str, bool | None], ...] = ()
    aliases: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    template: bool = True
    unknown: int | None = None

    def pipeline(
        self, config: Mapping[str, Any], file: Path, charsmap: bytes | None = None
    ) -> Pipeline:
        """Return the pipeline of a folder's settings."""
        values = [flag(config, file, key, default) for key, default in self.settings]
        return self.build(*values, *([charsmap] if self.model == "Unigram" else []))


_WORDS = (("do_lower_case", True), ("strip_accents", None), ("tokenize_chinese_chars", True))
_BYTES, _PIECES = (("add_prefix_space", False),), (("add_prefix_space", True),)
_MERGES, _BPE_PIECES = ("vocab.json",), ("sentencepiece.bpe.model",)

_ALL = (
    TokenizerClass(
        "BertTokenizer", "WordPiece", ("vocab.txt",), bert, _WORDS,
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
        lambda *words: replace(bert(*words), around=_AROUND, mask_strips=True),
        _WORDS, models=("mpnet",),
    ),
    TokenizerClass(JAPANESE, "WordPiece", ("vocab.txt",), bert),
    TokenizerClass(
        "RobertaTokenizer", "BPE", _MERGES, roberta, (*_BYTES, ("trim_offsets", True)),
        aliases=(
            "BartTokenizer", "LEDTokenizer", "LongformerTokenizer", "MvpTokenizer",
        ),
        models=("data2vec-text", "ibert", "lilt", "longformer", "roberta", "roberta-prelayernorm"),
    ),
    TokenizerClass(
        "GPT2Tokenizer", "BPE", _MERGES, roberta, (*_BYTES, ("trim_offsets", True)),
        models=("gpt2",), template=False,
    ),
    TokenizerClass(
        "DebertaTokenizer", "BPE", _MERGES, byte_deberta, _BYTES, models=("deberta",)
    ),
    TokenizerClass(
        "HerbertTokenizer", "BPE", _MERGES, lambda: word_ends(lowercase=False),
        models=("herbert",),
    ),
    TokenizerClass(
        "OpenAIGPTTokenizer", "BPE", _MERGES, lambda: word_ends(lowercase=True),
        models=("openai-gpt",), template=False,
    ),
    TokenizerClass(
        "XLMRobertaTokenizer", "Unigram", _BPE_PIECES, xlm_roberta, _PIECES,
        models=("gte", "jina_embeddings_v3", "xlm-roberta", "xmod"), unknown=3,
    ),
    TokenizerClass(
        "CamembertTokenizer", "Unigram", _BPE_PIECES, xlm_roberta, _PIECES,
        models=("camembert",), unknown=3,
    ),
    TokenizerClass(
        "AlbertTokenizer", "Unigram", ("spiece.model",), albert,
        (("do_lower_case", True), ("keep_accents", False), *_PIECES),
        aliases=("FNetTokenizer",), models=("albert", "fnet", "yoso"), unknown=1,
    ),
    TokenizerClass(
        "BigBirdTokenizer", "Unigram", ("spiece.model",), big_bird, _PIECES,
        models=("big_bird",),
    ),
    TokenizerClass(
        "DebertaV2Tokenizer", "Unigram", ("spm.model",), piece_deberta,
        (("do_lower_case", False), ("split_by_punct", False), *_PIECES),
        models=("deberta-v2",),
    ),
)  # fmt: skip
CLASSES = {name: entry for entry in _ALL for name in (entry.name, *entry.aliases)}
"""The classes that are read here, by name without "Fast"."""
_OF_MODEL = {kind: entry for entry in _ALL for kind in entry.models}
_GENERIC_MODELS = ("modernbert", "modernbert-decoder", "nystromformer", "xlm-roberta-xl")
"""Model types for which `AutoTokenizer` takes the generic class, whatever the folder names."""

_FOREIGN: dict[str, tuple[Any, ...]] = {
    "word_tokenizer_type": (None,), "subword_tokenizer_type": (None,), "mecab_kwargs": (None,),
    "sudachi_kwargs": (None,), "jumanpp_kwargs": (None,), "do_word_tokenize": (None, True),
    "do_subword_tokenize": (None, True), "do_basic_tokenize": (None, True),
    "never_split": (None, []), "split_special_tokens": (None, False),
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


def find_class(folder: Path, config: Mapping[str, Any]) -> TokenizerClass | None:
    """Find the class of a folder's tokenizer, as `AutoTokenizer` does.

    None if it is the generic one, or if the folder names none.

    Raises:
        TokenizerError: the class is not supported, or a setting is of another class.
    """
    model = read_settings(folder / "config.json")
    kind, location = str(model.get("model_type")), folder / CONFIG
    class_name = config.get("tokenizer_class")
    if class_name is None and model.get("tokenizer_class") is not None:
        class_name, location = model["tokenizer_class"], folder / "config.json"
    default = _OF_MODEL.get(kind)
    if kind in _GENERIC_MODELS and (folder / "tokenizer.json").exists():
        return None
    name = str(class_name).removesuffix("Fast") if class_name not in GENERIC else None
    if class_name is not None and name is not None and name not in CLASSES:
        message = f"the tokenizer class {class_name!r:.80} is not supported"
        supported = ", ".join(entry.name for entry in _ALL)
        fix = f"Supported are {supported} and {GENERIC[0]}. {_UNCHANGED}"
        raise TokenizerError(message, where=location, fix=fix)
    tokenizer_class = default if class_name is None else CLASSES.get(str(name))
    if tokenizer_class is None or tokenizer_class.name != JAPANESE:
        for key, neutral in _FOREIGN.items():
            if config.get(key) not in neutral:
                title = "the generic class" if tokenizer_class is None else tokenizer_class.name
                message = f"{key!r} is {config[key]!r:.60}, which {title}, "
                message += "the tokenizer class of this folder, does not read"
                fix = "If the model was trained without it, remove it. If it is Japanese BERT, set "
                fix += f'"tokenizer_class": "{JAPANESE}".'
                raise TokenizerError(message, where=folder / CONFIG, fix=fix)
    if not (folder / "tokenizer.json").exists() and class_name is None:
        for name, owner in _OTHER_FILES.items():
            if (folder / name).exists():
                message = f"holds {name}, a file of {owner}, which is not supported"
                fix = f"If the model was trained without it, name its tokenizer_class in {CONFIG}."
                raise TokenizerError(message, where=folder, fix=fix)
    return tokenizer_class


def reconcile(
    backend: Backend,
    ends: Ends,
    tokenizer_class: TokenizerClass | None,
    config: Mapping[str, Any],
    file: Path,
) -> None:
    """Apply the settings to the backend of `tokenizer.json`, and compare it with its class.

    Raises:
        TokenizerError: a setting is neither true nor false or contradicts the file, or the file
            does not what the class does.
    """
    if tokenizer_class is None:
        if config.get("tokenizer_class") is None:  # a file alone: its settings count, if any
            _follow(backend, config, file)
        return
    # Merges cannot be read as pieces, whatever the settings say
    if (kind := _kind(backend)) != tokenizer_class.model:
        other = f"builds {tokenizer_class.model}"
        raise _mismatch(file, f"holds a {kind} model", tokenizer_class, other)
    unknown = name_in(config, SETTINGS["unknown"]) or NAMES["unknown"][0]
    if kind == "WordPiece" and backend.model.unk_token != unknown:
        how = f"has the unknown token {backend.model.unk_token!r}"
        raise _mismatch(file, how, tokenizer_class, f"has {unknown!r}")
    _follow(backend, config, file)
    maps = (
        base64.b64decode(step["precompiled_charsmap"])
        for step in steps_of(backend.normalizer)
        if step["type"] == "Precompiled"
    )
    charsmap = next(maps, None) if tokenizer_class.model == "Unigram" else None
    actual = backend_settings(backend)
    for key, default in tokenizer_class.settings:
        value = actual.get(key)
        stated = flag(config, file, key, default)
        if key == "strip_accents" and stated is None:
            stated = flag(config, file, "do_lower_case", True)
        if value is None or value == stated:
            continue
        origin = "not set, which means " if config.get(key) is None else ""
        message = f"{key!r} is {origin}{json.dumps(stated)}, but {json.dumps(value)} in {file.name}"
        fix = f"or name the class {GENERIC[0]}, to use the file."
        if tokenizer_class.model == "Unigram":
            fix = "which transformers used before version 5; since then it uses the setting."
        fix = f"Set it to {json.dumps(value)}, {fix}"
        raise TokenizerError(message, where=file.with_name(CONFIG), fix=fix)
    pipelines = [tokenizer_class.pipeline(config, file, charsmap)]
    if tokenizer_class.build in (big_bird, piece_deberta) and charsmap is not None:
        pipelines.append(tokenizer_class.pipeline(config, file))
    elif tokenizer_class.build is byte_deberta:
        pipelines.append(replace(pipelines[0], around=_AROUND))
    _compare(backend, pipelines, ends, tokenizer_class, file)


def _follow(backend: Backend, config: Mapping[str, Any], file: Path) -> None:
    """Apply settings that are stated, of BERT's and of byte-level tokenizers."""
    norm, cut, post = backend.normalizer, backend.pre_tokenizer, backend.post_processor
    if isinstance(norm, normalizers.BertNormalizer) and _kind(backend) == "WordPiece":
        norm.lowercase = flag(config, file, "do_lower_case", norm.lowercase)
        cjk = flag(config, file, "tokenize_chinese_chars", norm.handle_chinese_chars)
        norm.handle_chinese_chars = cjk
        if "strip_accents" in config:  # null means as do_lower_case
            norm.strip_accents = flag(config, file, "strip_accents", None)
        backend.normalizer = norm  # normalises added tokens again
    if isinstance(cut, pre_tokenizers.ByteLevel) and _kind(backend) == "BPE":
        cut.add_prefix_space = flag(config, file, "add_prefix_space", cut.add_prefix_space)
        if isinstance(post, processors.RobertaProcessing):
            post.add_prefix_space = flag(config, file, "add_prefix_space", post.add_prefix_space)
            post.trim_offsets = flag(config, file, "trim_offsets", post.trim_offsets)


def _kind(backend: Backend) -> str:
    return type(backend.model).__name__


def backend_settings(backend: Backend) -> dict[str, bool]:
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
            all_steps = [*steps_of(norm), *steps_of(cut)]
            steps = {step["type"]: step for step in all_steps}
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
    "a\x85b\x1cc", "in\tside\nline\u2028par\u00a0nbsp", "  two  spaces ", " a \n\n b  ", " ", "\t",
)  # fmt: skip


def _compare(
    backend: Backend,
    choices: list[Pipeline],
    ends: Ends,
    tokenizer_class: TokenizerClass,
    file: Path,
) -> None:
    """Refuse a `tokenizer.json` whose model has other settings than its class, or that divides odd
    texts otherwise.

    Files of transformers 4 may keep blanks as words that the class, like SentencePiece, drops;
    there the class is followed.
    """
    model = backend.model
    if tokenizer_class.model == "WordPiece":
        prefix, max_characters = model.continuing_subword_prefix, model.max_input_chars_per_word
        if prefix != "##" or max_characters != 100:
            how = f"marks tokens with {prefix!r} in words of up to {max_characters} characters"
            raise _mismatch(file, how, tokenizer_class, "with '##' up to 100")
    elif tokenizer_class.model == "BPE":
        suffix = model.end_of_word_suffix or ""
        if suffix != choices[0].suffix:
            how = f"marks the ends of words with {suffix!r}"
            raise _mismatch(file, how, tokenizer_class, f"with {choices[0].suffix!r}")
        if model.ignore_merges or model.byte_fallback:
            raise _mismatch(file, "goes round its merges", tokenizer_class, "uses them")
    elif tokenizer_class.unknown is not None:
        try:
            unknown = model.tokenize("\U0010fffd")[0].id
        except Exception:  # tokenizers raises nothing narrower for a model without an unknown token
            unknown = None
        if unknown != tokenizer_class.unknown:
            how = f"has the unknown token {unknown}"
            raise _mismatch(file, how, tokenizer_class, f"has {tokenizer_class.unknown}")
    actual = (backend.normalizer, backend.pre_tokenizer)
    for text in (*PROBES, *_BLANKS):
        words = _divide(*actual, text)
        differing = [_divide(choice.normalizer, choice.pre_tokenizer, text) for choice in choices]
        if words in differing:
            continue
        if text in _BLANKS and tokenizer_class.model == "Unigram":
            backend.pre_tokenizer = choices[0].pre_tokenizer
            break
        how = f"divides {text!r} into {words!r:.120}"
        raise _mismatch(file, how, tokenizer_class, f"into {differing[0]!r:.120}")
    post = backend.post_processor
    around = [edges(backend, choice.around(ends)) for choice in choices]
    if tokenizer_class.template and post is not None and edges(backend, post) not in around:
        how = "puts other special tokens around texts"
        raise _mismatch(file, how, tokenizer_class, "has its own")


def edges(backend: Backend, post: processors.PostProcessor) -> list[tuple[list[int], list[int]]]:
    """Return the ids and segments of a text and of a pair after a post-processor."""
    original = backend.post_processor
    backend.post_processor = post
    rows = [backend.encode("a"), backend.encode("a", "b")]
    backend.post_processor = original
    return [(row.ids, row.type_ids) for row in rows]


def _divide(
    norm: normalizers.Normalizer | None, cut: pre_tokenizers.PreTokenizer | None, text: str
) -> list[str]:
    normal = text if norm is None else norm.normalize_str(text)
    return [normal] if cut is None else [word for word, _ in cut.pre_tokenize_str(normal)]


def _mismatch(file: Path, how: str, tokenizer_class: TokenizerClass, other: str) -> TokenizerError:
    message = f"{how}; {tokenizer_class.name}, the tokenizer class of the folder, {other}"
    return TokenizerError(message, where=file, fix=_UNCHANGED)


# Japanese words

_JAPANESE_FIX = (
    'Supported are "word_tokenizer_type": "mecab" with "subword_tokenizer_type": "wordpiece" or '
    '"character", which needs "normalize_text", and in "mecab_kwargs" the keys mecab_dic, '
    "mecab_option and normalize_text."
)
_MECAB_KEYS = {"mecab_dic", "mecab_option", "normalize_text"}


@dataclass(frozen=True)
class JapaneseWords:
    """How text is divided.

    Attributes:
        dictionary: the package of MeCab's dictionary: unidic_lite, unidic or ipadic; None for that
            of the system.
        normalise: apply NFKC first.
        characters: divide words into characters instead of WordPiece.
    """

    dictionary: str | None = "unidic_lite"
    option: str = ""
    normalise: bool = True
    lowercase: bool = False
    characters: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of `tokenizer_config.json`."""
        return {
            "tokenizer_class": JAPANESE,
            "do_lower_case": self.lowercase,
            "word_tokenizer_type": "mecab",
            "subword_tokenizer_type": "character" if self.characters else "wordpiece",
            "mecab_kwargs": {
                "mecab_dic": self.dictionary,
                "mecab_option": self.option or None,
                "normalize_text": self.normalise,
            },
        }

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline without the division into words, which `attach` adds."""
        norm, decoder = normalizers.NFKC(), decoders.WordPiece(prefix="##")
        cut = pre_tokenizers.WhitespaceSplit()
        return Pipeline(norm if self.normalise else None, cut, decoder)

    def attach(self, backend: Backend) -> Backend:
        """Return a copy of a backend that divides words by MeCab.

        Raises:
            ResourceError: MeCab or its dictionary is not installed.
        """
        with optional("ja", "dividing Japanese words"):
            import fugashi

            option = self.option
            if self.dictionary is not None:
                folder = importlib.import_module(self.dictionary).DICDIR
                option = f'-d "{folder}" -r "{folder}/mecabrc" {option}'
        copy = Backend.from_str(backend.to_str())
        divider = _Divider(fugashi.GenericTagger(option), self.lowercase, self.characters)
        copy.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(divider)
        return copy


class _Divider:
    """A pre-tokenizer: the parts of a text that MeCab says are words."""

    def __init__(self, tagger: Any, lowercase: bool, characters: bool) -> None:
        self._tagger, self._lowercase, self._characters = tagger, lowercase, characters

    def pre_tokenize(self, text: tokenizers.PreTokenizedString) -> None:
        text.split(self._split)

    def _split(self, _: int, normalized: Slice) -> list[Slice]:
        text, end, words = str(normalized), 0, list[Slice]()
        for node in self._tagger(text):
            start = text.index(node.surface, end)
            end = start + len(node.surface)
            word = normalized[start:end]
            assert word is not None
            if self._lowercase:  # as Python does: Σ at the end of a word becomes ς
                lowered = str(word).lower()
                word.lowercase()
                if len(lowered) == len(str(word)):
                    letters = iter(lowered)
                    word.map(lambda _, letters=letters: next(letters))
            # MeCab takes few blanks for such; transformers' WordPiece splits at the others.
            for match in re.finditer(r"(?s)." if self._characters else r"\S+", str(word)):
                piece = word[match.start() : match.end()]
                assert piece is not None
                words.append(piece)
        return words


def read_words(config: Mapping[str, Any], file: Path) -> JapaneseWords:
    """Read the settings of a folder with this class.

    Raises:
        TokenizerError: words are divided in a way that is not supported.
    """
    word = config.get("word_tokenizer_type") or "basic"
    subword = config.get("subword_tokenizer_type") or "wordpiece"
    kwargs = config.get("mecab_kwargs") or {}
    options = kwargs if isinstance(kwargs, dict) else {}
    words = JapaneseWords(
        dictionary=options.get("mecab_dic", "unidic_lite"),
        option=options.get("mecab_option") or "",
        normalise=options.get("normalize_text", True),
        lowercase=flag(config, file, "do_lower_case", False),
        characters=subword == "character",
    )
    divides = [flag(config, file, f"do_{kind}_tokenize", True) for kind in ("word", "subword")]
    if (
        word != "mecab"
        or subword not in ("wordpiece", "character")
        or not all(divides)
        or config.get("never_split")
        or not isinstance(kwargs, dict)
        or not set(options) <= _MECAB_KEYS
        or words.dictionary not in (None, "unidic_lite", "unidic", "ipadic")
        or not isinstance(words.option, str)
        or words.normalise not in (True, False)
        or (words.characters and not words.normalise)
    ):
        message = f"{JAPANESE} divides text into words by {word!r}, and words by {subword!r}"
        message += f", with the settings {kwargs!r:.80}"
        raise TokenizerError(message, where=file.with_name(CONFIG), fix=_JAPANESE_FIX)
    return words
