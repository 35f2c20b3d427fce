"""The tokenizers of BERT's descendants, built from the same parts as in transformers.

RoBERTa: Liu et al. 2019 (bytes, after Radford et al. 2019); XLM-R: Conneau et al. 2020, and ALBERT:
Lan et al. 2019 (both pieces of Kudo 2018); DeBERTa: He et al. 2020 (bytes in version 1, then
pieces); BigBird: Zaheer et al. 2020 (pieces). transformers rebuilds these classes from vocabulary
and settings. The settings here read a folder without `tokenizer.json`, and recognise a tokenizer
that is saved.

Notable choices. `<mask>`, and the [MASK] of ALBERT, BigBird and DeBERTa version 1, absorb the white
space before them, as in the published `tokenizer.json`. DeBERTa's authors write [CLS] A [SEP] B
[SEP] and normalise as SentencePiece does, and so do folders in the older layout here; transformers
5 puts a second [SEP] between texts in version 1, and uses its own normalisation in later versions.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors
from typing_extensions import assert_never

ALONE = "{cls} $A {sep}"
PAIR = "{cls} $A {sep} {sep} $B {sep}"
PAIR_OF_SEGMENTS = "{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1"

Ends = tuple[tuple[str, int], tuple[str, int]]
"""The token that begins an input and the one that ends it: (token, id) each."""


@dataclass(frozen=True)
class Bert:
    """WordPiece with BERT's normalisation.

    Attributes:
        strip_accents: None means as `lowercase`.
        cjk: surround ideographs with spaces.
        roberta: special tokens around texts as in RoBERTa, for MPNet.
    """

    lowercase: bool = True
    strip_accents: bool | None = None
    cjk: bool = True
    roberta: bool = False


@dataclass(frozen=True)
class WordEnds:
    """BPE over BERT's words, with "</w>" at their ends: OpenAI's GPT, HerBERT."""

    lowercase: bool = False


@dataclass(frozen=True)
class Roberta:
    """Byte-level BPE. `prefix_space`: read the first word of a text as if after a space."""

    prefix_space: bool = False
    trim_offsets: bool = True


@dataclass(frozen=True)
class XlmRoberta:
    """Unigram over words after "▁". `charsmap`: SentencePiece's normalisation, compiled."""

    prefix_space: bool = True
    charsmap: bytes | None = None


@dataclass(frozen=True)
class Albert:
    """XlmRoberta after English normalisation: uniform quotation marks, no accents, lower case."""

    lowercase: bool = True
    keep_accents: bool = False
    prefix_space: bool = True
    charsmap: bytes | None = None


@dataclass(frozen=True)
class ByteDeberta:
    """Byte-level BPE with BERT's special tokens. `doubled`: two [SEP] between texts."""

    prefix_space: bool = False
    doubled: bool = False


@dataclass(frozen=True)
class PieceDeberta:
    """Unigram over whole texts.

    Attributes:
        split_punctuation: split off each punctuation mark.
        charsmap: SentencePiece's compiled normalisation; None for that of transformers 5: white
            space becomes spaces, NFC, no white space at the end.
    """

    lowercase: bool = False
    split_punctuation: bool = False
    prefix_space: bool = True
    charsmap: bytes | None = None


@dataclass(frozen=True)
class BigBird:
    """Unigram over words with "▁" before them and BERT's special tokens.

    Attributes:
        charsmap: SentencePiece's compiled normalisation; None for that of transformers 5, which
            only joins spaces.
    """

    prefix_space: bool = True
    charsmap: bytes | None = None


Declared = Roberta | XlmRoberta | Albert | ByteDeberta | PieceDeberta | BigBird
"""Those that `tokenizer_config.json` declares as a class of transformers."""
Pipeline = Bert | WordEnds | Declared


@dataclass(frozen=True)
class Parts:
    """The parts of a `tokenizers.Tokenizer` around its model."""

    normalizer: normalizers.Normalizer | None
    pre_tokenizer: pre_tokenizers.PreTokenizer
    decoder: decoders.Decoder
    post_processor: processors.PostProcessor


def parts(pipeline: Pipeline, ends: Ends) -> Parts:
    """Build the parts of a pipeline."""
    match pipeline:
        case Bert(lowercase, accents, cjk, roberta):
            pair = PAIR if roberta else PAIR_OF_SEGMENTS
            decoder: decoders.Decoder = decoders.WordPiece(prefix="##")
            return Parts(*_bert_words(lowercase, accents, cjk), decoder, _template(pair, ends))
        case WordEnds(lowercase):
            accents = None if lowercase else False
            decoder = decoders.BPEDecoder(suffix="</w>")
            words = _bert_words(lowercase, accents, True)
            return Parts(*words, decoder, _template(PAIR_OF_SEGMENTS, ends))
        case Roberta(prefix, trim):
            cls, sep = ends
            post = processors.RobertaProcessing(sep, cls, trim, prefix)
            return Parts(
                None, pre_tokenizers.ByteLevel(add_prefix_space=prefix), decoders.ByteLevel(), post
            )
        case XlmRoberta(prefix, charsmap):
            norm = None if charsmap is None else normalizers.Precompiled(charsmap)
            return Parts(norm, *_words(prefix), _template(PAIR, ends))
        case Albert(_, _, prefix, _):
            return Parts(
                _albert_normalizer(pipeline), *_words(prefix), _template(PAIR_OF_SEGMENTS, ends)
            )
        case ByteDeberta(prefix, doubled):
            between = PAIR if doubled else PAIR_OF_SEGMENTS
            cut = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
            return Parts(None, cut, decoders.ByteLevel(), _template(between, ends))
        case PieceDeberta(_, split, prefix, _):
            spaces, joined = _spaces("always" if prefix else "first")
            marks = [pre_tokenizers.Punctuation("isolated")] if split else []
            before = pre_tokenizers.Sequence([*marks, spaces])
            return Parts(
                _deberta_normalizer(pipeline), before, joined, _template(PAIR_OF_SEGMENTS, ends)
            )
        case BigBird(prefix, charsmap):
            first = (
                normalizers.Strip(left=False, right=False)
                if charsmap is None
                else normalizers.Precompiled(charsmap)
            )
            steps = normalizers.Sequence([first, normalizers.Replace(Regex(" {2,}"), "▁")])
            return Parts(
                steps, *_spaces("always" if prefix else "never"), _template(PAIR_OF_SEGMENTS, ends)
            )
        case _:
            assert_never(pipeline)


def _bert_words(
    lowercase: bool, accents: bool | None, cjk: bool
) -> tuple[normalizers.Normalizer, pre_tokenizers.PreTokenizer]:
    norm = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=cjk, strip_accents=accents, lowercase=lowercase
    )
    return norm, pre_tokenizers.BertPreTokenizer()


def _words(prefix: bool) -> tuple[pre_tokenizers.PreTokenizer, decoders.Decoder]:
    cut, joined = _spaces("always" if prefix else "never")
    return pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), cut]), joined


def _spaces(scheme: str) -> tuple[pre_tokenizers.PreTokenizer, decoders.Decoder]:
    return pre_tokenizers.Metaspace("▁", prepend_scheme=scheme), decoders.Metaspace(
        "▁", prepend_scheme=scheme
    )


def _deberta_normalizer(deberta: PieceDeberta) -> normalizers.Normalizer:
    first = [normalizers.Lowercase()] if deberta.lowercase else []
    if deberta.charsmap is None:
        white = normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " ")
        return normalizers.Sequence(
            [*first, white, normalizers.NFC(), normalizers.Strip(left=False, right=True)]
        )
    mapped = [
        normalizers.Strip(),
        normalizers.Precompiled(deberta.charsmap),
        normalizers.Replace(Regex(" {2,}"), " "),
    ]
    return normalizers.Sequence([*first, *mapped])


def _albert_normalizer(albert: Albert) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = [
        normalizers.Replace("``", '"'),
        normalizers.Replace("''", '"'),
    ]
    if not albert.keep_accents:
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if albert.lowercase:
        steps.append(normalizers.Lowercase())
    if albert.charsmap is not None:
        steps.append(normalizers.Precompiled(albert.charsmap))
    return normalizers.Sequence(steps)


def _template(pair: str, ends: Ends) -> processors.PostProcessor:
    (cls, _), (sep, _) = ends
    single, both = (form.format(cls=cls, sep=sep).split() for form in (ALONE, pair))
    return processors.TemplateProcessing(
        single=single, pair=both, special_tokens=list(dict.fromkeys(ends))
    )


def declaration(spec: Mapping[str, Any], ends: Ends) -> dict[str, Any] | None:
    """Return the transformers class and settings that rebuild a `tokenizer.json`; None if none."""
    saved = (_steps(spec), spec["pre_tokenizer"], spec["decoder"], spec["post_processor"])
    for pipeline in _candidates(spec):
        if _built_parts(parts(pipeline, ends)) == saved:
            return {"bos_token": ends[0][0], "eos_token": ends[1][0]} | _settings(
                pipeline, spec["model"].get("unk_id")
            )
    return None


def _candidates(spec: Mapping[str, Any]) -> Iterator[Declared]:
    """Yield the pipelines that the model may be part of; most fix the id of the unknown token."""
    both = (False, True)
    match spec["model"]:
        case {
            "type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False,
            "continuing_subword_prefix": None | "", "end_of_word_suffix": None | "",
            "byte_fallback": False, "ignore_merges": False,
        }:  # fmt: skip
            yield from (Roberta(*choice) for choice in itertools.product(both, both))
            yield from (ByteDeberta(prefix, doubled=True) for prefix in both)
        case {"type": "Unigram", "unk_id": unknown, "byte_fallback": False}:
            if unknown == 3:
                yield from (XlmRoberta(prefix, charsmap_of(spec["normalizer"])) for prefix in both)
            if unknown == 1:
                yield from (
                    Albert(*choice, charsmap_of(spec["normalizer"]))
                    for choice in itertools.product(both, both, both)
                )
            yield from (PieceDeberta(*choice) for choice in itertools.product(both, both, both))
            if (
                unknown is not None and spec["model"]["vocab"][unknown][1] == 0
            ):  # transformers looks it up with this score
                yield from (BigBird(prefix) for prefix in both)


def _settings(pipeline: Declared, unknown: int | None) -> dict[str, Any]:
    """Return the settings of the transformers class; `unknown` is the model's unknown token."""
    match pipeline:
        case Roberta(prefix, trim):
            return {
                "tokenizer_class": "RobertaTokenizer",
                "add_prefix_space": prefix,
                "trim_offsets": trim,
            }
        case XlmRoberta(prefix, _):
            return {"tokenizer_class": "XLMRobertaTokenizer", "add_prefix_space": prefix}
        case Albert(lowercase, accents, prefix, _):
            named = {
                "do_lower_case": lowercase,
                "keep_accents": accents,
                "add_prefix_space": prefix,
            }
            return {"tokenizer_class": "AlbertTokenizer", **named}
        case ByteDeberta(prefix):
            return {"tokenizer_class": "DebertaTokenizer", "add_prefix_space": prefix}
        case PieceDeberta(lowercase, split, prefix):
            named = {
                "do_lower_case": lowercase,
                "split_by_punct": split,
                "add_prefix_space": prefix,
            }
            return {"tokenizer_class": "DebertaV2Tokenizer", **named, "unk_id": unknown}
        case BigBird(prefix):
            named = {"add_prefix_space": prefix}
            return {
                "tokenizer_class": "BigBirdTokenizer",
                **named,
                "bos_token": "<s>",
                "eos_token": "</s>",
            }
        case _:
            assert_never(pipeline)


def steps_of(part: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return the single steps of a normaliser or pre-tokenizer as `tokenizer.json` has it."""
    match part:
        case None:
            return []
        case {"type": "Sequence", "normalizers": steps} | {
            "type": "Sequence",
            "pretokenizers": steps,
        }:
            return [step for each in steps for step in steps_of(each)]
        case _:
            return [part]


def _steps(spec: Mapping[str, Any]) -> list[Any]:
    """Return the normaliser's steps, without a last one that joins spaces: words end there."""
    steps = steps_of(spec["normalizer"])
    several = spec["normalizer"] is not None and spec["normalizer"]["type"] == "Sequence"
    joins = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    return steps[:-1] if several and steps[-1:] == [joins] else steps


def charsmap_of(normalizer: Mapping[str, Any] | None) -> bytes | None:
    """Return the compiled normalisation among the steps of a normaliser; None without one."""
    texts = (s["precompiled_charsmap"] for s in steps_of(normalizer) if s["type"] == "Precompiled")
    text = next(texts, None)
    return None if text is None else base64.b64decode(text)


def _built_parts(made: Parts) -> tuple[Any, ...]:
    made_parts = (made.normalizer, made.pre_tokenizer, made.decoder, made.post_processor)
    norm, *others = (
        None if part is None else json.loads(part.__getstate__()) for part in made_parts
    )
    return (_steps({"normalizer": norm}), *others)
