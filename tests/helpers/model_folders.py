"""Small models of transformers and ours, their folders, and what they give on fixed text."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import family_peers
from bert_peers import draw_input
from bothways.model.config import EncoderConfig, PostNorm, PreNorm
from bothways.model.families.catalogue import FAMILIES
from bothways.model.heads import Head, LabelHead, MaskedHead, PairHead, PoolerHead
from bothways.model.model import Model
from bothways.model.positions import Learned
from random_weights import perturb
from spread import in_turn

VOCAB, WIDTH, LENGTHS = 60, 16, [5, 9, 2]
ORDERS = {"Bert": PostNorm(), "MegatronBert": PreNorm()}
CLASSES: dict[str, tuple[Head, ...]] = {
    "ForPreTraining": (MaskedHead(), PoolerHead(), PairHead()),
    "ForMaskedLM": (MaskedHead(),),
    "ForNextSentencePrediction": (PoolerHead(), PairHead()),
    "ForSequenceClassification": (PoolerHead(), LabelHead(3)),
    "Model": (PoolerHead(),),
}
STEMS_AND_NAMES = pytest.mark.parametrize(
    ("name", "stem"), in_turn([(name,) for name in CLASSES], [*ORDERS])
)


def peer(stem: str, name: str) -> Any:
    """A small model of transformers, every parameter moved away from where it starts."""
    torch.manual_seed(1)
    config = getattr(transformers, f"{stem}Config")(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=20,
        hidden_act="gelu_new",
        id2label={0: "no", 1: "maybe", 2: "yes"},
        label2id={"no": 0, "maybe": 1, "yes": 2},
    )
    model = getattr(transformers, stem + name)(config).eval()
    return perturb(model, 0.2)


def folder_of(
    model: Any, place: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None
) -> Path:
    model.save_pretrained(place)
    if change is not None:
        file = place / "model.safetensors"
        tensors = change(load_file(file))
        file.unlink()
        save_file(tensors, file, metadata={"format": "pt"})
    return place


def own(name: str, stem: str = "Bert") -> Model:
    torch.manual_seed(2)
    changes = {"position": Learned(20), "order": ORDERS[stem], "activation": "gelu_tanh"}
    config = EncoderConfig(VOCAB, WIDTH, 2, 2, 24, **changes)
    return perturb(Model(config, CLASSES[name]), 0.2).eval()


TEXT = draw_input(EncoderConfig(VOCAB, WIDTH, 2, 2, 24), LENGTHS)


def outputs(model: Model) -> list[Tensor]:
    """All that the heads give, on fixed text."""
    return family_peers.outputs(model, TEXT.batch)


def peer_outputs(model: Any) -> list[Tensor]:
    classes = {a.name: a for family in FAMILIES for a in family.architectures}
    return family_peers.answers(model(**TEXT.padded), classes[type(model).__name__], TEXT.kept)


def assert_same_outputs(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def change_settings(folder: Path, name: str = "config.json", /, **settings: Any) -> None:
    """Change settings in a file of a folder; None removes one."""
    file = folder / name
    tree = {**json.loads(file.read_text()), **settings}
    file.write_text(json.dumps({key: value for key, value in tree.items() if value is not None}))


def truncate(file: Path, share: float) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])


def with_decoder(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        **tensors,
        "cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"].clone(),
        "cls.predictions.decoder.bias": tensors["cls.predictions.bias"].clone(),
    }
