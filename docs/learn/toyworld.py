"""A small world of stories about animals, and the training data and loop of chapters 5 to 9.

A story has one person, one animal and one colour. The animal lives in one of four habitats, each
with places and actions of its own, so a hidden word can be guessed from words on both sides of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from bert import Config, PreTraining
from torch import Tensor

HABITATS = {
    "farm": ("cow horse sheep goat pig hen", "barn stable meadow yard", "grazes rests feeds"),
    "house": ("dog cat hamster parrot rabbit rat", "kitchen garden hall attic", "plays naps eats"),
    "forest": ("wolf fox bear deer owl boar", "woods cave thicket hill", "hunts hides roams"),
    "sea": ("whale shark seal crab squid salmon", "reef bay harbour waves", "swims dives floats"),
}  # fmt: skip
ANIMALS = {name: words[0].split() for name, words in HABITATS.items()}
PEOPLE = {"anna": "she", "clara": "she", "emma": "she", "ben": "he", "david": "he", "felix": "he"}
COLOURS = ["black", "white", "brown", "grey", "red"]
FRAMES = (
    "{person} saw a {colour} {animal} in the {place} .",
    "the {colour} {animal} {action} in the {other} .",
    "{pronoun} watched the {animal} near the {place} .",
    "every morning the {animal} {action} there .",
    "in the {other} {person} waits for the {animal} .",
    "{pronoun} likes the {colour} {animal} .",
)


def story(rng: random.Random) -> list[str]:
    """Return a document: the first sentence names everyone, three others follow in random order."""
    animals, places, actions = (words.split() for words in HABITATS[rng.choice([*HABITATS])])
    person = rng.choice([*PEOPLE])
    place, other = rng.sample(places, 2)
    words = {
        "person": person, "pronoun": PEOPLE[person], "colour": rng.choice(COLOURS), "place": place,
        "other": other, "animal": rng.choice(animals), "action": rng.choice(actions),
    }  # fmt: skip
    return [frame.format(**words) for frame in (FRAMES[0], *rng.sample(FRAMES[1:], 3))]


def stories(count: int, seed: int = 0) -> list[list[str]]:
    """Return documents of four sentences."""
    rng = random.Random(seed)
    return [story(rng) for _ in range(count)]


SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD, UNK, CLS, SEP, MASK = range(5)
TOKENS = SPECIALS + sorted(
    {word for text in stories(2_000) for line in text for word in line.split()}
)
IDS = {token: id for id, token in enumerate(TOKENS)}
SMALL = Config(len(TOKENS), width=64, layers=2, heads=4, inner=256, positions=32, dropout=0.0)


def encode(a: str, b: str | None = None) -> tuple[list[int], list[int]]:
    """Return the ids of `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`, and the segments, 0 or 1."""
    parts = [[IDS.get(word, UNK) for word in text.split()] + [SEP] for text in (a, b) if text]
    ids = [CLS, *parts[0]]
    return (ids + parts[1], [0] * len(ids) + [1] * len(parts[1])) if b else (ids, [0] * len(ids))


def mask_tokens(
    ids: list[int], rng: random.Random, rate: float = 0.15, mix: tuple[float, float] = (0.8, 0.1)
) -> tuple[list[int], list[int]]:
    """Return the input and the targets: mix is the share of [MASK] and of random words."""
    places = [at for at, id in enumerate(ids) if id not in (CLS, SEP)]
    seen, targets = list(ids), [-100] * len(ids)
    for at in rng.sample(places, max(1, round(rate * len(ids)))):
        targets[at] = ids[at]
        draw = rng.random()
        if draw < mix[0]:
            seen[at] = MASK
        elif draw < sum(mix):
            seen[at] = rng.randrange(len(SPECIALS), len(TOKENS))
    return seen, targets


def draw_pair(documents: list[list[str]], rng: random.Random) -> tuple[str, str, int]:
    """Return A, B and 0 if B follows A in its document; else 1 and any sentence."""
    document = rng.choice(documents)
    at = rng.randrange(len(document) - 1)
    if rng.random() < 0.5:
        return document[at], document[at + 1], 0
    return document[at], rng.choice(rng.choice(documents)), 1


def pad(rows: list[list[int]], value: int) -> Tensor:
    """Return rows of different lengths as one (B, T) tensor."""
    longest = max(map(len, rows))
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows])


Example = tuple[list[int], list[int], list[int], int]  # input, targets, segments, pair


def example(documents: list[list[str]], rng: random.Random, **masking: object) -> Example:
    """Return one masked pair."""
    a, b, label = draw_pair(documents, rng)
    ids, segments = encode(a, b)
    seen, targets = mask_tokens(ids, rng, **masking)  # type: ignore[arg-type]
    return seen, targets, segments, label


def collate(examples: list[Example]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return ids, targets, segments and mask, each (B, T), and the labels of the pairs (B)."""
    seen, targets, segments, labels = zip(*examples, strict=True)
    ids = pad(list(seen), PAD)
    return ids, pad(list(targets), -100), pad(list(segments), 0), ids != PAD, torch.tensor(labels)


def train(
    model: PreTraining,
    draw: Callable[[], Example],
    loss: Callable[..., Tensor],
    steps: int,
    rate: float = 2e-3,
    size: int = 32,
) -> list[float]:
    """Train with 10 % of warm-up and a linear decay, as in A.2. Return the losses."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.999), weight_decay=0.01
    )
    warmup, losses = max(1, steps // 10), []
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = rate * min(
            step / warmup, (steps + 1 - step) / (steps + 1 - warmup)
        )
        value = loss(*collate([draw() for _ in range(size)]))
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(value.item())
    return losses
