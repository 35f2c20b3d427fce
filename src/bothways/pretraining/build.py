"""A pre-training run before it begins: what is trained, on what data, and the preflight."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import assert_never

from bothways.core.errors import ConfigError
from bothways.core.finding import Finding, report_findings
from bothways.data import next_sentence as nextsentence
from bothways.data.corpus import Corpus
from bothways.data.corpus_source import CorpusSource, FullSentences, NextSentence
from bothways.data.loader import Loader, Share
from bothways.data.masking import Vocabulary
from bothways.families.catalogue import family_for
from bothways.hub.hf_config import read_hf_config
from bothways.hub.model_folder import load_model
from bothways.hub.resolve import resolve
from bothways.model.head_config import Head, MaskedHead, PairHead, PoolerHead
from bothways.model.lstm_config import LSTMConfig, ModelConfig
from bothways.model.model import Model, token_head
from bothways.model.positions import Learned
from bothways.objectives.causal_lm import CausalLMLearner
from bothways.objectives.masked_lm import MaskedLMLearner
from bothways.preflight.machine import Load, check_machine
from bothways.preflight.model import check_model
from bothways.pretraining.config import PretrainConfig, PretrainPhase
from bothways.text.template import Template
from bothways.text.tokenizer import Tokenizer
from bothways.training.parallel import Plan

C = TypeVar("C", bound=ModelConfig)
Learning = MaskedLMLearner | CausalLMLearner
LOOKED_AT = 1_000_000
"""Sentences of the corpus whose lengths the preflight looks at, at most."""


def heads_for(encoder: ModelConfig, segments: FullSentences | NextSentence) -> tuple[Head, ...]:
    """The heads that these segments can train: what predicts tokens from this encoder, and the pair head, which needs pairs.

    Raises:
        ConfigError: pairs for a language model: none of its vectors has read both segments.
    """
    head = token_head(encoder)
    match segments:
        case NextSentence() if not isinstance(head, MaskedHead):
            what = f"next-sentence pairs go with masked LM, and this encoder is trained by the head {head.kind!r}"
            raise ConfigError(what, where="segments", fix="Set segments=full_sentences.")
        case NextSentence():
            return head, PoolerHead(), PairHead()
        case FullSentences():
            return (head,)
        case _:
            assert_never(segments)


def fit_to_corpus(encoder: C, tokenizer: Tokenizer) -> C:
    """The encoder for a tokenizer: its rows, and its padding, from which RoBERTa's positions count."""
    pad = tokenizer.specials.pad
    if isinstance(encoder, LSTMConfig):
        return dataclasses.replace(encoder, vocab=tokenizer.size, pad=pad)
    position = encoder.position
    if isinstance(position, Learned) and position.offset:
        position = dataclasses.replace(position, offset=pad + 1)
    return dataclasses.replace(encoder, vocab=tokenizer.size, pad=pad, position=position)


def begin_from(source: str, settings: PretrainConfig, corpus: Corpus) -> Model:
    """A model folder's weights with the heads that the settings train; heads that the folder lacks must be among `fresh`.

    Raises:
        FolderError: the folder lacks a head, or is no model.
        TokenizerError: the folder has no tokenizer.
        ConfigError: pairs for a language model; a corpus of another vocabulary, whose ids mean other tokens to the model.
    """
    folder = resolve(source)
    if Tokenizer.load(folder).backend.get_vocab() != corpus.tokenizer.backend.get_vocab():
        what = f"the corpus {corpus.folder} was built with another vocabulary than that of {source}"
        raise ConfigError(
            what,
            where="start",
            fix=f"Build it with that one: bothways corpus build … --tokenizer {source}",
        )
    torch.manual_seed(settings.seed)
    return load_model(
        folder, heads_for(read_hf_config(folder).encoder, settings.segments), settings.fresh
    ).model


def learner_of(settings: PretrainConfig, corpus: Corpus, start: Model | None) -> Learning:
    """What is trained, `start` or new weights: a masked language model, or one that reads in one direction, or in each."""
    torch.manual_seed(settings.seed)
    model = start or Model(settings.encoder, heads_for(settings.encoder, settings.segments))
    if isinstance(token_head(model.config), MaskedHead):
        return MaskedLMLearner(model, settings.masking, vocabulary_of(corpus))
    return CausalLMLearner(model)


def vocabulary_of(corpus: Corpus) -> Vocabulary:
    """What masking knows of a corpus' vocabulary."""
    tokenizer = corpus.tokenizer
    return Vocabulary(tokenizer.special, tokenizer.continues, tokenizer.specials.mask)


def loader_of(
    settings: PretrainConfig,
    corpus: Corpus,
    chosen: NDArray[Any],
    phase: PretrainPhase,
    plan: Plan,
    learner: Learning,
) -> Loader[Any]:
    """Steps over the chosen documents in sequences of a phase; each rank has its share."""
    source = CorpusSource(
        corpus,
        corpus.tokenizer.template,
        settings.segments_of(phase),
        chosen,
        settings.seed,
        settings.data_copies,
    )
    share = Share(plan.rank, plan.world)
    return Loader(
        source, learner.prepare, settings.batch, settings.microbatch_tokens, settings.seed, share
    )


def preflight(
    settings: PretrainConfig, corpus: Corpus, folder: Path, device: torch.device
) -> list[Finding]:
    """What is to be known before the run: ids, disk, memory, sentences that will be cut or stand alone; no errors among it.

    Raises:
        BothwaysError: there are errors; it lists them all.
    """
    longest = max(phase.length for phase in settings.phases)
    heads = heads_for(settings.encoder, settings.segments)
    checkpoints, recompute = settings.training.keep.last + 2, settings.training.recompute
    load = Load(
        settings.encoder, heads, longest, settings.microbatch_tokens, checkpoints, recompute
    )
    findings = [
        *check_model(settings.encoder, corpus.tokenizer, longest),
        *_check_class(settings.encoder, heads, corpus.tokenizer),
        *_check_pairs(settings, corpus.tokenizer.template),
        *_check_documents(settings, corpus),
        *check_machine(load, folder, device),
    ]
    room = dataclasses.replace(settings.segments, length=longest).room
    cut = int((np.diff(corpus.sentences[:LOOKED_AT].astype(np.int64)) > room).sum())
    if cut:
        share = cut / min(len(corpus.sentences) - 1, LOOKED_AT)
        what = f"{share:.1%} of the sentences are longer than {room} tokens and will be cut"
        findings.append(Finding("truncation", "note", what, "phases"))
    return report_findings(findings)


def _check_class(
    encoder: ModelConfig, heads: Iterable[Head], tokenizer: Tokenizer
) -> list[Finding]:
    """Whether the model can be saved in the end, and who opens it then."""
    family = family_for(encoder, tokenizer.kind)
    kinds = [head.kind for head in heads]
    if family is None:
        what = "no family of transformers has this configuration: bothways will open the model's folder, transformers will not"
        return [Finding("heads", "note", what, "encoder")]
    if family.architecture_with(kinds) is not None:
        return []
    what = f"transformers has no class of the family {family.model_type} with the heads {', '.join(kinds)}"
    return [
        Finding(
            "heads", "error", what, "segments", "Set segments=full_sentences, for masked LM alone."
        )
    ]


def _check_pairs(settings: PretrainConfig, template: Template) -> list[Finding]:
    """Whether the tokenizer's pairs are as next sentences need them."""
    if not _pairs(settings) or template.pair == nextsentence.SPECIALS:
        return []
    what = f"next-sentence pairs are [CLS] A [SEP] B [SEP], and this tokenizer has {template.pair} special tokens there"
    return [
        Finding("heads", "error", what, "segments", "Set segments=full_sentences, as RoBERTa does.")
    ]


def _check_documents(settings: PretrainConfig, corpus: Corpus) -> list[Finding]:
    """Whether most documents have a next sentence; of one without, every pair is random."""
    alone = float((np.diff(corpus.documents[: LOOKED_AT + 1]) == 1).mean())
    if not _pairs(settings) or alone <= 0.5:
        return []
    what = f"{alone:.1%} of the documents are one sentence, and next-sentence pairs of those are all random"
    fix = "Build the corpus with --boundary blank or file, or set segments=full_sentences."
    return [Finding("balance", "warning", what, "segments", fix)]


def _pairs(settings: PretrainConfig) -> bool:
    """Whether there are next-sentence pairs in any phase."""
    return any(isinstance(settings.segments_of(phase), NextSentence) for phase in settings.phases)
