"""`bothways plan`: the cost of a pre-training run before it begins."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from bothways.cli import options

if TYPE_CHECKING:
    from bothways.data.corpus import Corpus
    from bothways.model.config import EncoderConfig
    from bothways.pretraining.config import PretrainConfig
    from bothways.pretraining.forecast import RunForecast


def plan(  # noqa: PLR0913 – one option per question
    model: str,
    *settings: str,
    tokens: float | None = None,
    end: options.RunLength = options.RunLength(),  # noqa: B008 – frozen
    corpus: str | None = None,
    recipe: str | None = None,
    teacher: str | None = None,
    config: options.ConfigFile = None,
    hardware: str = "here",
    ranks: int = 1,
    utilisation: float | None = None,
    price: float | None = None,
    json: options.JsonOutput = False,
    device: options.Device = "auto",
) -> None:
    """Forecast time, memory, checkpoints and price of a pre-training run, and how to place it.

    Parameters
    ----------
    model
        A preset such as bert-base, or a model folder or Hub id for its shape.
    settings
        Settings of pretrain by dotted path, such as training.recompute=true microbatch_tokens=8192.
    tokens
        Tokens to read, such as 3.3e9.
    corpus
        A folder made by `bothways corpus build`: its tokens and its vocabulary.
    recipe
        The recipe to start from, and the default, as for pretrain; with a teacher as for distil.
    teacher
        A model folder or Hub id: the run distils it into MODEL.
    hardware
        here measures this machine; a card is computed from its data sheet: l4, a10, rtx3090,
        rtx4090, a100-40, l40s, a100, h100, h200, b200, mi300x.
    ranks
        Number of cards.
    utilisation
        The share of the card's rate that a step reaches, as you have measured it; default 0.35.
    price
        Price of a card, or of this machine, per hour, in any currency.
    """
    import json as json_format

    from bothways.core.config.reader import replaced_members
    from bothways.core.errors import ConfigError
    from bothways.core.progress import terminal_progress
    from bothways.core.runtime.cards import card_named
    from bothways.core.runtime.devices import gpu_memory
    from bothways.core.terminal import write_stderr
    from bothways.data.corpus import Corpus
    from bothways.pretraining.config import load_pretraining
    from bothways.pretraining.forecast import UTILISATION, Cards, Here, forecast_run
    from bothways.pretraining.recipes import chosen_settings, distillation

    text = None if corpus is None else Corpus.open(corpus)
    length = [] if end.duration is None else [f"training.until={end.duration}"]
    if tokens is not None:
        if length or any(word.startswith(("until=", "training.until=")) for word in settings):
            message = f"is given as tokens={tokens:g}, and the length of the run once more"
            raise ConfigError(message, where="tokens", fix="Give one of them.")
        if not 1 <= tokens < math.inf:
            raise ConfigError(f"must be at least 1 and finite, not {tokens:g}", where="tokens")
        settings = (f"training.until={int(tokens)} tokens", *settings)
    if hardware == "here":
        for name, changed in (("ranks", ranks != 1), ("utilisation", utilisation is not None)):
            if changed:
                message = "is for cards; this machine is measured with one rank"
                raise ConfigError(message, where=name, fix="Name a card: --hardware h100")
        target: Here | Cards = Here(device)
        gpu = gpu_memory(device)
    else:
        share = UTILISATION if utilisation is None else utilisation
        target = Cards(card_named(hardware), ranks, share)
        gpu = target.card.memory

    def with_settings(base: PretrainConfig) -> PretrainConfig:
        """Return the settings of a recipe with those of this call."""
        return load_pretraining(base, [*settings, *length], config)

    if teacher is None:
        run, notes = chosen_settings(recipe, _encoder(model, text), None, with_settings, gpu)
    else:
        base = distillation(teacher, text, model, recipe)
        run = with_settings(base)
        notes = [f"note: {member}" for member in replaced_members(run, base)]
    for note in notes:
        write_stderr(note)
    with terminal_progress() as progress:
        corpus_tokens = None if text is None else float(text.manifest.counts.tokens)
        done = forecast_run(
            run, target, corpus_tokens=corpus_tokens, price=price, progress=progress
        )
    if json:
        print(json_format.dumps(done.to_json(), ensure_ascii=False, allow_nan=False))
    else:
        _show(done)


def _encoder(model: str, text: Corpus | None) -> EncoderConfig:
    """Return the shape of a preset or folder, with the vocabulary of a corpus if there is one."""
    from bothways.model.families.catalogue import PRESETS, preset
    from bothways.pretraining.build import fit_to_corpus, start_encoder

    is_preset = model in PRESETS or not Path(model).is_dir()
    encoder = preset(model) if is_preset and "/" not in model else start_encoder(model)
    return encoder if text is None else fit_to_corpus(encoder, text.tokenizer)


def _show(done: RunForecast) -> None:
    """Print the forecast as tables."""
    from bothways.core.terminal import output_console, time_text
    from bothways.training.step_cost import USABLE, size_text

    console = output_console()
    interval = done.total / max(1, done.checkpoints)
    checkpoints = (
        f"{done.checkpoints:,} of {size_text(done.checkpoint)}, one each {time_text(interval)}"
    )
    run = [
        ("parameters", f"{done.parameters:,}"),
        ("tokens", f"{done.tokens:,.0f}"),
        ("updates", f"{done.updates:,}"),
        ("operations", f"{done.operations * done.tokens:.3g}"),
        ("tokens per second", f"{done.rate:,.0f}"),
        ("checkpoints", checkpoints),
        *((f"time: {name}", time_text(value)) for name, value in done.seconds.items() if value),
        ("time in all", time_text(done.total)),
    ]
    if done.cost is not None:
        run.append(("price", f"{done.cost:,.2f}"))
    memory = done.choice.memory
    activations = f"activations of {done.microbatch:,} tokens"
    sizes = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        activations: memory.activations,
        "teacher": memory.frozen,
        "gathered": memory.gathered,
    }
    rows = [(name, size_text(count)) for name, count in sizes.items() if count]
    free = size_text(done.free) if math.isfinite(done.free) else "unknown"
    rows.append((f"all, of {free} of which {USABLE:.0%} count", size_text(memory.total)))
    rows.append(("most tokens at once (microbatch_tokens)", f"{done.largest:,}"))
    options.show_tables(
        options.CommandTable(f"A run on {done.hardware}", ("", ""), run),
        options.CommandTable("Memory of a rank", ("", ""), rows),
    )
    say = f"placement: {done.choice.placement}, because {done.choice.why}"
    console.print(say, highlight=False, soft_wrap=True)
    for sentence in done.assumed:
        console.print(f"assumed: {sentence}", highlight=False, style="dim", soft_wrap=True)
