"""BERT in plain PyTorch, to be read beside the paper (Devlin et al. 2018, sections 3 and A.2).

Shapes: B texts, T tokens of the longest one, H width, A heads, D = H / A, V tokens of the
vocabulary. A test compares all numbers with those of the library and of transformers.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu


@dataclass(frozen=True)
class Config:
    """BERT-base; BERT-large is width 1024, layers 24, heads 16, inner 4096."""

    vocabulary: int = 30_522
    width: int = 768
    layers: int = 12
    heads: int = 12
    inner: int = 3072
    positions: int = 512
    segments: int = 2
    dropout: float = 0.1
    causal: bool = False  # True: each token sees only those to its left, as in GPT


class Embeddings(nn.Module):
    """Figure 2: the sum of three vectors for each token, normalised."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.positions, config.width)
        self.segment = nn.Embedding(config.segments, config.width)
        self.norm = nn.LayerNorm(config.width, eps=1e-12)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, ids: Tensor, segments: Tensor) -> Tensor:
        """(B, T) ids and segments → (B, T, H)."""
        position = self.position.weight[: ids.shape[1]]  # (T, H): the same for all texts
        x: Tensor = self.dropout(self.norm(self.token(ids) + self.segment(segments) + position))
        return x


class Attention(nn.Module):
    """Each token takes a weighted mean of all tokens' values, once for each head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.causal = config.heads, config.causal
        self.query, self.key, self.value, self.output = (
            nn.Linear(config.width, config.width) for _ in range(4)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, H) → (B, T, H), and the weights (B, A, T, T). mask (B, T): True is a token."""
        # (B, T, H) → (B, T, A, D) → (B, A, T, D): a head attends in its own D dimensions.
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        # The product of two random vectors has a variance of D: √D keeps softmax from saturating.
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])  # (B, A, T queries, T keys)
        allowed = mask[:, None, None, :]  # nobody reads padding
        if self.causal:
            allowed = allowed & torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        weights = scores.masked_fill(~allowed, -math.inf).softmax(-1)  # each row sums to 1
        mixed = self.dropout(weights) @ v  # (B, A, T, D)
        return self.output(mixed.transpose(1, 2).flatten(-2)), weights


class Layer(nn.Module):
    """Attention, then a network for each token alone; post-norm: x ← LayerNorm(x + f(x))."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.attention_norm = nn.LayerNorm(config.width, eps=1e-12)
        self.up = nn.Linear(config.width, config.inner)
        self.down = nn.Linear(config.inner, config.width)
        self.norm = nn.LayerNorm(config.width, eps=1e-12)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, H) → (B, T, H), and the weights of attention (B, A, T, T)."""
        mixed, weights = self.attention(x, mask)
        x = self.attention_norm(x + self.dropout(mixed))
        return self.norm(x + self.dropout(self.down(gelu(self.up(x))))), weights


@dataclass(frozen=True)
class Output:
    """The embeddings and the output of each layer, the weights of attention, the pooled [CLS]."""

    layers: list[Tensor]  # each (B, T, H)
    attentions: list[Tensor]  # each (B, A, T, T)
    pooled: Tensor  # (B, H)


class Bert(nn.Module):
    """The encoder: embeddings, layers, and the pooler, which reads [CLS]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.pooler = nn.Linear(config.width, config.width)

    def forward(self, ids: Tensor, segments: Tensor, mask: Tensor) -> Output:
        """Ids (B, T); segments (B, T): 0 for A and 1 for B; mask (B, T): False is padding."""
        x = self.embeddings(ids, segments)
        layers, attentions = [x], []
        for layer in self.layers:
            x, weights = layer(x, mask)
            layers.append(x)
            attentions.append(weights)
        return Output(layers, attentions, self.pooler(x[:, 0]).tanh())


class PreTraining(nn.Module):
    """BERT with both heads of pre-training: the masked token, and whether B follows A."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.bert = Bert(config)
        self.transform = nn.Linear(config.width, config.width)
        self.transform_norm = nn.LayerNorm(config.width, eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(config.vocabulary))
        self.pair = nn.Linear(config.width, 2)  # 0: B follows A, 1: B is from elsewhere
        for name, weight in self.named_parameters():
            if weight.dim() == 2:  # Google's code: σ = 0.02, cut at 2σ
                nn.init.trunc_normal_(weight, std=0.02, a=-0.04, b=0.04)
            elif "norm" not in name:
                nn.init.zeros_(weight)

    def masked(self, vectors: Tensor) -> Tensor:
        """(…, H) → (…, V): the output matrix *is* the token embedding (tied weights)."""
        hidden = self.transform_norm(gelu(self.transform(vectors)))
        logits: Tensor = hidden @ self.bert.embeddings.token.weight.T + self.bias
        return logits

    def forward(self, ids: Tensor, segments: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of all tokens (B, T, V) and of the pairs (B, 2)."""
        output = self.bert(ids, segments, mask)
        return self.masked(output.layers[-1]), self.pair(output.pooled)

    def loss(
        self, ids: Tensor, targets: Tensor, segments: Tensor, mask: Tensor, pairs: Tensor
    ) -> Tensor:
        """Return the sum of both losses; a target of -100 is a token that is not predicted."""
        tokens, following = self(ids, segments, mask)
        masked = cross_entropy(tokens.flatten(0, 1), targets.flatten())
        return masked + cross_entropy(following, pairs)


# From the names in released files: "bert.encoder.layer.3.output.dense.bias" → "layers.3.down.bias".
NAMES = {
    r"^bert\.": "", r"^encoder\.layer\.": "layers.", r"^cls\.(predictions\.)?": "",
    "word_embeddings": "token", "token_type_embeddings": "segment", "_embeddings": "",
    r"attention\.self": "attention", r"attention\.output\.LayerNorm": "attention_norm",
    r"intermediate\.dense": "up", r"(?<=\d\.)output\.dense": "down", r"output\.LayerNorm": "norm",
    r"transform\.LayerNorm": "transform_norm", "LayerNorm": "norm", r"\.dense": "",
    "seq_relationship": "pair",
}  # fmt: skip


def renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a released BERT under the names of `PreTraining`."""
    result = {}
    for name, weight in weights.items():
        for theirs, ours in NAMES.items():
            name = re.sub(theirs, ours, name)  # noqa: PLW2901
        heads = ("transform", "bias", "pair.")
        # The decoder is the token embedding once more, and position_ids is 0 … 511.
        if "decoder" not in name and "position_ids" not in name:
            result[name if name.startswith(heads) else f"bert.{name}"] = weight
    return result


def load(folder: str | Path) -> PreTraining:
    """Load a folder that this library or transformers saved; a head may be missing."""
    raw = json.loads((Path(folder) / "config.json").read_text("utf8"))
    names = """vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size
        max_position_embeddings type_vocab_size hidden_dropout_prob"""  # in the order of Config
    model = PreTraining(Config(*(raw[name] for name in names.split())))
    weights = renamed(load_file(Path(folder) / "model.safetensors"))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or any(name.startswith("bert.") for name in missing):
        raise ValueError(f"{folder} is no BERT: {unexpected or missing}")
    return model.eval()
