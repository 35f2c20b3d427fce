"""A small encoder of each family, examples of each task, and what transformers computes from them."""

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import models

from bothways.core.batch import pack
from bothways.hub.model_folder import save_model
from bothways.model.attention.patterns import Window
from bothways.model.config import EncoderConfig
from bothways.model.families.catalogue import preset
from bothways.model.heads import Head
from bothways.model.model import Model
from bothways.model.positions import Disentangled, Learned
from bothways.prediction.engine import predict
from bothways.prediction.opening import open_task_model
from bothways.pretraining.build import fit_to_corpus
from bothways.tasks.base import TaskModel
from bothways.tasks.catalogue import Trainable
from bothways.tasks.choice.task import ChoiceExample, ChoiceTask
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.multilabel.task import MultilabelExample, MultilabelTask
from bothways.tasks.question_answering.examples import Question
from bothways.tasks.question_answering.task import QuestionAnsweringTask
from bothways.tasks.regression.task import RegressionTask
from bothways.tasks.tagging.examples import TagExample
from bothways.tasks.tagging.task import TaggingTask
from bothways.tasks.text_task import TextExample
from bothways.text.tokenizer import Tokenizer
from bothways.text.tokenizer_classes import (
    Pipeline,
    albert,
    bert,
    big_bird,
    byte_deberta,
    find_specials,
    piece_deberta,
    xlm_roberta,
)
from bothways.text.tokenizer_files import bert_backend, dress, finish
from bothways.text.trainers import SPECIALS, ByteBPE, train_vocabulary

LENGTH = 32

WORDS = ("ape", "bee", "cat", "dog", "elk", "fox", "gnu", "hen")

TEXTS = [" ".join(WORDS[(at + step) % 8] for step in range(1 + at % 5)) for at in range(16)]

FAMILIES = {
    "bert": "bert-tiny",
    "megatron-bert": "megatron-bert-345m",
    "roberta": "roberta-base",
    "xlm-roberta": "xlm-roberta-base",
    "distilbert": "distilbert-base-uncased",
    "albert": "albert-base-v2",
    "electra": "electra-small-discriminator",
    "deberta": "deberta-base",
    "deberta-v2": "deberta-v2-xlarge",
    "longformer": "longformer-base-4096",
    "big_bird": "bigbird-roberta-base",
}


def unigram(names: list[str], pipeline: Pipeline, unknown: int) -> Tokenizer:
    letters = sorted(set("".join(WORDS)))
    pieces = [("▁" + word, -3.0) for word in WORDS] + [(letter, -8.0) for letter in ["▁", *letters]]
    backend = tokenizers.Tokenizer(
        models.Unigram([*((name, 0.0) for name in names), *pieces], unk_id=unknown)
    )
    specials = find_specials(backend, {}, "made here")
    dress(backend, pipeline, specials)
    return Tokenizer(finish(backend, specials), specials)


BYTE_NAMES = (("s", "CLS"), ("pad", "PAD"), ("/s", "SEP"), ("unk", "UNK"), ("mask", "MASK"))


@functools.cache
def tokenizer_of(family: str) -> Tokenizer:
    match family:
        case "roberta" | "longformer":
            return train_vocabulary(TEXTS, ByteBPE(300))
        case "xlm-roberta":
            return unigram(["<s>", "<pad>", "</s>", "<unk>", "<mask>"], xlm_roberta(), 3)
        case "big_bird":
            return unigram(
                ["<pad>", "</s>", "<s>", "[CLS]", "[SEP]", "[MASK]", "<unk>"], big_bird(), 6
            )
        case "albert":
            return unigram(["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"], albert(), 1)
        case "deberta":
            spec = json.loads(train_vocabulary(TEXTS, ByteBPE(300)).backend.to_str())["model"]
            names = {f"<{old}>": f"[{new}]" for old, new in BYTE_NAMES}
            vocab = {names.get(token, token): id for token, id in spec["vocab"].items()}
            backend = tokenizers.Tokenizer(
                models.BPE(vocab, [tuple(merge) for merge in spec["merges"]])
            )
            specials = find_specials(backend, {}, "made here")
            dress(backend, byte_deberta(prefix_space=True), specials)
            return Tokenizer(finish(backend, specials), specials)
        case "deberta-v2":
            return unigram(["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"], piece_deberta(), 3)
        case _:
            backend = bert_backend(
                {word: id for id, word in enumerate([*SPECIALS, *WORDS, "##s"])},
                bert(),
            )
            specials = find_specials(backend, {}, "made here")
            return Tokenizer(finish(backend, specials), specials)


def encoder_of(family: str, tokenizer: Tokenizer) -> EncoderConfig:
    """The family's shape, made tiny."""
    shape = fit_to_corpus(preset(FAMILIES[family]), tokenizer)
    narrow = None if shape.embedding is None else 8
    tiny = replace(
        shape, width=16, depth=2, heads=2, intermediate_size=24, embedding=narrow, initial_range=0.3
    )
    if isinstance(
        shape.position, Disentangled
    ):  # without the decoder, which transformers does not have
        buckets = None if shape.position.buckets is None else 8
        return replace(
            tiny,
            position=replace(shape.position, max_positions=40, buckets=buckets, absolute="none"),
        )
    assert isinstance(shape.position, Learned)
    near = (Window(2, global_attention=True),) if family == "longformer" else shape.patterns
    return replace(tiny, position=replace(shape.position, max_positions=40), patterns=near)


def pairs(labels: tuple[str, ...]) -> list[TextExample]:
    return [
        TextExample(text, TEXTS[-at] if at % 2 else None, labels[at % len(labels)])
        for at, text in enumerate(TEXTS)
    ]


def question(at: int) -> Question:
    context = " ".join(TEXTS[(at + step) % 16] for step in range(2))
    word = context.split()[at % 2]
    return Question(str(at), TEXTS[at], context, ((word, context.index(word)),), False)


def each(make: Callable[[int, str], Any]) -> list[Any]:
    return [make(at, text) for at, text in enumerate(TEXTS)]


def tagged(text: str) -> TagExample:
    words = tuple(text.split())
    return TagExample(words, tuple("B-X" if word < "d" else "O" for word in words))


LABELS = (("a",), ("a", "b"), ())
TASKS: list[tuple[Trainable, list[Any]]] = [
    (ClassificationTask(), pairs(("no", "yes", "perhaps"))),
    (RegressionTask(), pairs(("0.5", "1.25", "4"))),
    (MultilabelTask(), each(lambda at, text: MultilabelExample(text, None, LABELS[at % 3]))),
    (ChoiceTask(), each(lambda at, text: ChoiceExample(text, (TEXTS[-at - 1], WORDS[at % 8]), at % 2))),
    (TaggingTask(), each(lambda at, text: tagged(text))),
    (QuestionAnsweringTask(), each(lambda at, text: question(at))),
]  # fmt: skip


def ours(task: TaskModel[Any, Any], example: Any) -> np.ndarray:
    """The logits of an example that is one sequence."""
    (item,) = task.encode([example])
    (sequence,) = item.sequences
    with torch.no_grad():
        return np.asarray(task.eval().outputs(pack([sequence]))[0])


def class_of(folder: Path) -> Any:
    """The class of transformers that a folder names."""
    settings = json.loads((folder / "config.json").read_text())
    return getattr(transformers, settings["architectures"][0])


def theirs(folder: Path, example: Any) -> np.ndarray:
    """The same from the class that the folder names, with the tokenizer that transformers finds there."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    read = functools.partial(tokenizer, return_tensors="pt")
    model, info = class_of(folder).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        match example:
            case ChoiceExample(context, endings):
                rows = read([context] * len(endings), list(endings), padding=True)
                logits = model(**{name: value[None] for name, value in rows.items()}).logits[0]
            case TagExample(words):
                row = read(list(words), is_split_into_words=True)
                first = [row.word_ids(0).index(number) for number in range(len(words))]
                logits = model(**row).logits[0, first]
            case Question():
                found = model(**read(example.question, example.context))
                logits = torch.stack([found.start_logits[0], found.end_logits[0]], -1)
            case TextExample() | MultilabelExample():
                texts = [text for text in (example.text, example.text_b) if text is not None]
                logits = model(**read(*texts)).logits[0]
    return logits.numpy()


def assert_opens_as_it_was(folder: Path, task: TaskModel[Any, Any], examples: list[Any]) -> None:
    opened = open_task_model(str(folder), device="cpu")
    assert opened.task == task.task
    again = [prediction.to_json() for _, prediction in predict(opened, examples)]
    assert again == [prediction.to_json() for _, prediction in predict(task, examples)]


def saved(family: str, heads: tuple[Head, ...], folder: Path) -> tuple[Model, Tokenizer, Any, Any]:
    """A random model as a folder, and what transformers opens there."""
    torch.manual_seed(3)
    tokenizer = tokenizer_of(family)
    model = Model(encoder_of(family, tokenizer), heads).eval()
    save_model(folder, model, tokenizer)
    read = transformers.AutoTokenizer.from_pretrained(folder)
    return model, tokenizer, class_of(folder).from_pretrained(folder), read
