"""What is tested of every family alike: its classes against transformers, through a folder, in every mode.

A caller says what is read: `Read` gives a batch for us, and what a model of theirs makes of the same sequences.
"""

import itertools
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from bothways.core.batch import Batch, Layout
from bothways.hub.model_folder import load_model, save_model
from bothways.hub.weight_files import open_weights
from bothways.model.families.catalogue import FAMILIES
from bothways.model.families.family import Architecture, Family
from bothways.model.families.weight_names import to_file_names
from bothways.model.model import Model
from bothways.model.parameters import parameter_table
from bothways.text.trainers import Unigram, train_vocabulary
from drawn_settings import draw_settings
from random_weights import perturb
from spread import first_of

SPECIALS = {"bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"}
"""In settings, and a tokenizer that is given knows better."""
LONG = ("longformer", "big_bird")
"""Their batches of mixed lengths are no reference: BigBird's last block and draws are those of the longest sequence."""
DERIVED = ("megatron-bert", "xlm-roberta", "camembert", "ernie")
"""Families with the classes and heads of another one."""
Read = Callable[[nn.Module, int], tuple[Batch, Callable[[nn.Module, Architecture], list[Tensor]]]]
"""A model of theirs and a seed → a batch, and what a model of theirs of some class gives for it."""


def every_class(seeds: Sequence[int]) -> list[Any]:
    """Each class with each seed, slow but for one seed of each class and one class of a derived family."""
    classes = [(family, a) for family in FAMILIES for a in family.architectures]
    grid = [
        (family, architecture, seeds[(number + turn) % len(seeds)])
        for number, (family, architecture) in enumerate(classes)
        for turn in range(len(seeds))
    ]
    kinds = [f.model_type if f.model_type in DERIVED else a.name for f, a, _ in grid]
    return first_of(grid, kinds, [f"{a.name}-{seed}" for _, a, seed in grid])


def long_inputs(theirs: nn.Module, seed: int) -> tuple[Batch, Callable[..., list[Tensor]]]:
    """Sequences packed for us, with global tokens for Longformer; for them one after the other."""
    torch.manual_seed(seed)
    lengths, config = [41, 7, 60, 1, 41, 28], theirs.config
    tokens = sum(lengths)
    named = torch.rand(tokens) < 0.1 if config.model_type == "longformer" else None
    segments = torch.randint(config.type_vocab_size, (tokens,))
    batch = Batch(torch.randint(4, 50, (tokens,)), segments, Layout.of(lengths), {}, named)

    def given(model: nn.Module, architecture: Architecture) -> list[Tensor]:
        parts = []
        for start, stop in itertools.pairwise(batch.layout.cu_seqlens.tolist()):
            if getattr(config, "attention_type", "") == "block_sparse":
                # It stays with full attention after one short input.
                base = model if hasattr(model, "set_attention_type") else model.bert
                base.set_attention_type("block_sparse")
            row = {"input_ids": batch.ids, "token_type_ids": batch.segments}
            row |= {} if named is None else {"global_attention_mask": named.long()}
            several = "choice" in architecture.heads
            row = {k: v[start:stop][(None,) * (1 + several)] for k, v in row.items()}
            kept = torch.ones(1, stop - start, dtype=torch.bool)
            parts.append(answers(model(**row), architecture, kept))
        return [torch.cat(part) for part in zip(*parts, strict=True)]

    return batch, given


def peer(family: Family, architecture: Architecture, seed: int, dropout: float = 0.0) -> nn.Module:
    """Theirs, every parameter moved away from where it starts."""
    torch.manual_seed(seed)
    cls = getattr(transformers, architecture.name)
    settings = draw_settings(family.model_type, seed, dropout)
    named = {"num_labels": 3} if architecture.heads & {"labels", "tags"} else {}
    return perturb(cls(cls.config_class(**settings, **named)), 0.15)


def outputs(model: Model, batch: Batch) -> list[Tensor]:
    """What ours gives: heads of sequences as training reads them, all others by a call."""
    alone = ("labels", "choice", *(() if "masked" in model.heads else ("pair",)))
    if found := [model.read(kind, batch) for kind in alone if kind in model.heads]:
        return found
    kinds = ("masked", "causal", "replaced", "pair", "tags", "span")
    output = model(batch, heads=[kind for kind in kinds if kind in model.heads])
    if output.logits:
        return list(output.logits.values())
    pooled = output.pooler_output
    return [output.last_hidden_state, *([] if pooled is None else [pooled])]


def answers(theirs: Any, architecture: Architecture, kept: Tensor) -> list[Tensor]:
    """What theirs gave, in the order of `outputs`. `kept`: where the rectangle that it read holds a token."""
    if architecture.bare:
        pooled = [theirs.pooler_output] if architecture.heads else []
        return [theirs.last_hidden_state[kept], *pooled]
    if "pair" in architecture.heads and "masked" not in architecture.heads:
        return [theirs.logits]
    if "pair" in architecture.heads:
        pair = theirs.sop_logits if "sop_logits" in theirs else theirs.seq_relationship_logits
        return [theirs.prediction_logits[kept], pair]
    if "span" in architecture.heads:
        return [torch.stack([theirs.start_logits, theirs.end_logits], -1)[kept]]
    if "choice" in architecture.heads:
        return [theirs.logits.view(-1, 1)]
    return [theirs.logits if "labels" in architecture.heads else theirs.logits[kept]]


def assert_near(found: Tensor, wanted: Tensor, floor: float = 1.0) -> None:
    bound = 1e-5 * max(float(wanted.abs().max()), floor)
    torch.testing.assert_close(found, wanted, rtol=0, atol=bound)


def assert_class_equals(
    family: Family, architecture: Architecture, seed: int, read: Read, folder: Path
) -> None:
    """Read from their folder: outputs in evaluation with dropout configured, outputs and gradients in training without."""
    quiet = peer(family, architecture, seed, dropout=0.3).eval()
    quiet.save_pretrained(folder / "theirs")
    loaded = load_model(folder / "theirs")
    assert set(loaded.model.heads) == architecture.heads
    assert not loaded.report.faults
    spares = {spare.stored for spare in family.keys_for(loaded.model.config).spares.values()}
    assert set(loaded.report.unused) <= spares
    batch, given = read(quiet, seed)
    with torch.no_grad():
        pairs = zip(outputs(loaded.model, batch), given(quiet, architecture), strict=True)
        for found, wanted in pairs:
            assert_near(found, wanted)

    theirs = peer(family, architecture, seed).train()
    theirs.save_pretrained(folder / "training")
    mine = load_model(folder / "training").model.train()
    for found, wanted in zip(outputs(mine, batch), given(theirs, architecture), strict=True):
        assert_near(found.detach(), wanted.detach())
        weights = torch.randn_like(wanted)
        (found * weights).sum().backward(retain_graph=True)
        (wanted * weights).sum().backward(retain_graph=True)
    assert_gradients_equal(family, architecture, mine, theirs)
    count = sum(parameter.numel() for parameter in mine.parameters())
    assert parameter_table(mine.config, mine.specification).total == count


def assert_gradients_equal(
    family: Family, architecture: Architecture, mine: Model, theirs: nn.Module
) -> None:
    names = [name for name, _ in theirs.named_parameters()]
    keys = family.keys_for(mine.config, names)
    gradients = {name: p.grad for name, p in mine.named_parameters() if p.grad is not None}
    found = to_file_names(keys, gradients)
    prefix = family.keys.prefix if architecture.bare else ""
    ties = {tie.stored: name for name, tie in keys.ties.items()}
    full = {prefix + name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    wanted = {ties.get(name, name): gradient for name, gradient in full.items()}
    assert found.keys() == wanted.keys()
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert_near(found[name], gradient, floor=largest * 1e-2)


def assert_folder_comes_back(
    family: Family,
    architecture: Architecture,
    seed: int,
    folder: Path,
    unsaid: Collection[str] = (),
) -> None:
    """Theirs → ours → theirs: class, settings, tensors by name and value; transformers opens it with nothing missing.

    Args:
        unsaid: settings that this class does not read and we do not write.
    """
    theirs = peer(family, architecture, seed, dropout=0.2)
    theirs.save_pretrained(folder / "theirs")
    loaded = load_model(folder / "theirs")
    tokenizer = None
    if family.vocabulary == "Unigram":
        tokenizer = train_vocabulary(["a few words to learn from"], Unigram(40))
    save_model(folder / "ours", loaded.model, tokenizer)
    before, after = open_weights(folder / "theirs"), open_weights(folder / "ours")
    assert set(after.shapes) == set(before.shapes)
    spares = family.keys_for(loaded.model.config).spares
    read = {spare.stored: name for name, spare in spares.items()}
    for name in after.shapes:
        assert torch.equal(before.read(read.get(name, name)), after.read(name))
    again, report = type(theirs).from_pretrained(folder / "ours", output_loading_info=True)
    assert not any(report.values())
    written, original = again.config.to_dict(), theirs.config.to_dict()
    assert written["model_type"] == family.model_type
    other = {"transformers_version", "dtype", "architectures", "_name_or_path", *unsaid}
    same = set(original) - other - (SPECIALS if tokenizer else set())
    assert {key: written[key] for key in same} == {key: original[key] for key in same}


def assert_alone_as_in_a_batch(model: Model, batch: Batch) -> None:
    """Each sequence of a batch gives what it gives alone."""
    together = model.encoder(batch).last.detach()
    for start, stop in itertools.pairwise(batch.layout.cu_seqlens.tolist()):
        mask, layout = batch.global_attention_mask, Layout.of([stop - start])
        named = None if mask is None else mask[start:stop]
        one = Batch(batch.ids[start:stop], batch.segments[start:stop], layout, {}, named)
        assert_near(model.encoder(one).last.detach(), together[start:stop])


def assert_drops_alike(
    theirs: nn.Module,
    batch: Batch,
    given: Callable[[nn.Module], list[Tensor]],
    copies: int,
    folder: Path,
) -> None:
    """One sequence many times over, each copy with draws of its own: what `given` reads of theirs is drawn as ours is."""
    theirs.save_pretrained(folder)
    mine = load_model(folder).model.train()
    with torch.no_grad():
        for found, wanted in zip(outputs(mine, batch), given(theirs.train()), strict=True):
            assert_same_moments(found.view(copies, -1), wanted.reshape(copies, -1))


def assert_same_moments(found: Tensor, wanted: Tensor) -> None:
    """First and second moments of every column of draws `(copies, outputs)`, within five standard errors."""
    for power in (1, 2):
        a, b = found.double() ** power, wanted.double() ** power
        error = ((a.var(0) + b.var(0)) / len(found)).sqrt()
        distance = float(((a.mean(0) - b.mean(0)) / error).abs().max())
        assert distance < 5, "dropout acts at other places or rates than in transformers"
    assert float(found.std(0).min()) > 0
