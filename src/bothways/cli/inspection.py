"""`bothways describe | compare | inspect-step | show | settings`: models and runs, looked into.

`compare` is a significance test of two models on the same labelled data, `inspect-step` does one
step of a run again, `show` prints what a model reads in training, and `settings` lists every
setting of the commands that train, from its declaration.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import bothways
from bothways.cli import options
from bothways.core.config.reader import config_difference, list_settings
from bothways.core.config.values import require_range
from bothways.core.errors import ConfigError, FolderError, call
from bothways.core.files import check_output_path
from bothways.core.progress import terminal_progress
from bothways.core.terminal import output_console, quantity, say, write_stderr
from bothways.hub.resolve import CONFIG_FILES, resolve, resolve_run
from bothways.pretraining import PretrainRecipe

if TYPE_CHECKING:
    from bothways.core.config.reader import Setting
    from bothways.hub.weight_files import LoadReport
    from bothways.model.config import EncoderConfig
    from bothways.model.heads import Head


def describe(model: str, /, *, length: int | None = None) -> None:
    """Show a model's family, configuration, parameters, memory and operations per token.

    Parameters
    ----------
    model
        A preset (bert-base), a model folder, the folder of a run, or the id of a Hub model, of
        which only config.json is downloaded.
    length
        The length of a sequence in tokens, for the number of operations; default: 128, or the
        positions of the model if these are fewer.
    """
    from rich.text import Text

    from bothways.model.families import bert

    description = _find(model)
    positions = description.config.max_positions
    length = min(128, positions) if length is None else length
    require_range(f"[1, {positions}]", length=length)
    console = output_console()
    console.print(Text.assemble((model, "bold"), f": {description.origin}"), soft_wrap=True)
    config = description.config
    rows = [
        [field.name, _text(getattr(config, field.name))] for field in dataclasses.fields(config)
    ]
    heads = list[str]()
    for head in description.heads:
        fields = [field for field in dataclasses.fields(head) if field.name != "kind"]
        values = {field.name: getattr(head, field.name) for field in fields}
        changes = [f"{f.name} {values[f.name]}" for f in fields if values[f.name] != f.default]
        heads.append(f"{head.kind} ({', '.join(changes)})" if changes else head.kind)
    rows.append(["(heads)", ", ".join(heads) or "none"])
    origin = options.CommandTable("Origin", ("", ""), [*description.facts.items()], 2)
    options.show_tables(
        *([origin] if description.facts else []),
        options.CommandTable("Configuration", ("setting", "value"), rows),
        *_size_tables(description, length),
    )
    if changes := config_difference(description.config, bert.base()):
        heading = "Against bert-base, as lines of a TOML file under [encoder]"
        for line in (heading, *changes, ""):
            say(console, line)
    if description.report is not None:
        console.print(Text.assemble(("Weights file", "bold"), f"\n{description.report}"))
    console.print(_DEFINITION, style="dim")


_DEFINITION = (
    "V vocabulary, H width, L blocks with weights of their own, I intermediate size. An operation "
    "(FLOP) is a multiplication or addition in a matrix product; look-ups, norms and activations "
    "are left out. In attention, only visible tokens count. A masked LM head predicts 15 % of the "
    "tokens. Training is a forward pass and twice that for the backward pass; AdamW in fp32 keeps "
    "weight, gradient and two moments. Activations need more memory, which depends on the batch."
)


@dataclass(frozen=True)
class _Found:
    origin: str
    config: EncoderConfig
    heads: tuple[Head, ...]
    report: LoadReport | None = None
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)


def _find(model: str) -> _Found:
    """Return a preset, a model folder, or a model of the Hub without its weights.

    A folder has priority over a preset of the same name.
    """
    from bothways.model.families.catalogue import PRESETS, nearest_preset

    local = Path(model).is_dir()
    if model in PRESETS and not local:
        return _preset(model)
    from bothways.hub.hf_config import open_model, read_hf_config
    from bothways.hub.model_folder import heads_of, plan_model
    from bothways.hub.provenance import model_facts

    try:
        folder = resolve(resolve_run(model), CONFIG_FILES)
    except FolderError as error:
        near = nearest_preset(model)
        fix, guess = error.fix or "", "Did you mean "
        if near and guess in fix:
            fix = f"{guess}{near} or {fix.removeprefix(guess)}"
        elif near:
            fix = f"{guess}{near}? {fix}"
        raise FolderError(error.what, where=error.where, fix=fix) from error
    settings = read_hf_config(folder)
    class_name = settings.architecture.name if settings.architecture else "no known class"
    origin = f"{settings.model_type}, {class_name}"
    if not local:
        return _Found(origin, settings.encoder, heads_of(settings, ()))
    settings, weights = open_model(folder)
    heads = heads_of(settings, weights.shapes)
    _, report = plan_model(settings, weights, heads)
    labels = settings.labels() if "id2label" in settings.raw else ()
    return _Found(origin, settings.encoder, heads, report, model_facts(folder, labels))


def _preset(name: str) -> _Found:
    from bothways.model import heads
    from bothways.model.families.catalogue import FAMILIES, family_for, preset

    config = preset(name)
    if family_for(config) is None:
        origin = "a preset without a class in transformers, with the head of pre-training"
        return _Found(origin, config, (heads.token_head(config),))
    families = [family for family in FAMILIES if family.config_rules.write(config) is not None]
    family = next(
        (family for family in families if name.startswith(family.model_type)), families[0]
    )
    candidates = (
        heads.PoolerHead(), heads.MaskedHead(), heads.PairHead(), heads.ReplacedHead(),
        heads.NextTokenHead(),
    )  # fmt: skip
    architecture = family.pretrained(name)
    origin = f"a preset of {family.model_type}, with the heads of {architecture.name}"
    return _Found(
        origin, config, tuple(head for head in candidates if head.kind in architecture.heads)
    )


def _text(value: object) -> str:
    """Return a setting as text; a member of a union by its kind, then its fields."""
    if isinstance(value, tuple):
        return ", ".join(map(_text, value))
    if not dataclasses.is_dataclass(value):
        return str(value)
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    kind = fields.pop("kind", "")
    values = ", ".join(f"{name} {_text(content)}" for name, content in fields.items())
    return f"{kind} ({values})" if kind and values else kind or values


_MEMORY = (
    ("inference, weights in fp32", 4),
    ("inference, weights in bf16", 2),
    ("training with AdamW in fp32", 16),
)
"""Bytes for each parameter."""


def _size_tables(
    description: _Found, length: int
) -> tuple[options.CommandTable, options.CommandTable]:
    """Return the parameters of each part, and the memory and the operations of all of them."""
    from bothways.model.parameters import parameter_table
    from bothways.training.step_cost import BACKWARD, forward_flops

    table = parameter_table(description.config, description.heads)
    encoder = parameter_table(description.config).entries
    textbook = [entry for entry in encoder if entry.textbook]
    sections = [("textbook: V·H + 12·L·H², where I = 4·H", textbook)] if textbook else []
    sections.append(("encoder", [entry for entry in encoder if not entry.textbook]))
    for head in table.entries[len(encoder) :]:
        sections.append((f"{sections[-1][0]} + {head.part}", [head]))
    rows, running = list[list[str]](), 0
    for title, entries in sections:
        running += sum(entry.count for entry in entries)
        counts = [(entry.part, entry.tensors, entry.count) for entry in entries]
        for name, tensors, count in [*counts, (title, "", running)]:
            rows.append([name, tensors, f"{count:,}", f"{count / table.total:.2%}"])
    parameters = options.CommandTable("Parameters", ("part", "tensors", "count", "share"), rows)

    forward = forward_flops(description.config, description.heads, length)
    costs = [
        [f"memory, {name}", f"{table.total * size / 2**20:,.1f} MiB"] for name, size in _MEMORY
    ]
    for name, times in (("inference", 1), ("training", 1 + BACKWARD)):
        label = f"operations per token, {name}, length {length}"
        costs.append([label, f"{forward * times / 1e6:,.1f} million"])
    return parameters, options.CommandTable("Costs", ("what", "how much"), costs)


def compare(
    a: str,
    b: str,
    data: str,
    *,
    task: str | None = None,
    columns: options.DataColumns = options.DataColumns(),  # noqa: B008 – frozen
    json: options.JsonOutput = False,
    device: options.Device = "auto",
) -> None:
    """Compare two models example by example: mean difference, permutation test, bootstrap.

    Parameters
    ----------
    a
        Model folder, folder of a run, or of a run with --seeds, whose grades are averaged.
    b
        The other model.
    data
        Labelled data: .csv, .tsv, .jsonl, .parquet, or hub:owner/name:configuration:split.
    task
        Task of the comparison; default: the task of the first model. Pre-trained models are
        compared by the log probability of each token given the others (likelihood).
    """
    from bothways.lab.sweeps import significance
    from bothways.prediction.opening import open_task
    from bothways.prediction.predictor import named_columns

    task_name = task or significance.default_task(significance.folders(a)[0])
    read_columns = None
    if columns.named:
        opened = open_task(significance.folders(a)[0], task_name, device="cpu")
        read_columns = named_columns(opened.task_model.task, **columns.named)
    with terminal_progress() as progress:
        comparison = significance.compare_runs(
            a, b, data, read_columns, device=device, task=task_name, progress=progress
        )
    if json:
        print(dumps(dataclasses.asdict(comparison)))
        return
    console = output_console()
    rows = []
    for side in (comparison.a, comparison.b):
        deviation = "–" if side.deviation is None else f"{side.deviation:.4f}"
        rows.append([side.name, str(len(side.grades)), f"{side.mean:.4f}", deviation])
    heads = ("model", "runs", "mean grade", "deviation over seeds")
    options.show_tables(options.CommandTable(f"Grades on {data}", heads, rows))
    if task_name == "likelihood":
        unit = "the mean log probability of a token given all others, in nats"
        say(console, f"note: a grade is {unit}")
    say(console, str(comparison))


def inspect_step(
    run: Path,
    step: int,
    *corpus: str,
    json: options.JsonOutput = False,
    device: options.Device = "auto",
) -> None:
    """Repeat one step of a run, and show each of its sequences with its losses and its gradient.

    The sequences are printed as by `bothways show`.

    The steps since the checkpoint before it are repeated, too. The run is not changed.

    Parameters
    ----------
    run
        The folder of a pre-training run.
    step
        The number of an update, from 1, such as the one that an error names.
    corpus
        The corpora of the run, in its order, if they are no longer where it read them.
    """
    from bothways.core.report import terminal
    from bothways.pretraining.inspect_step import open_recorded, recorded_data, repeat_step

    with terminal_progress() as progress:
        text = open_recorded(recorded_data(run), corpus)
        inspected = repeat_step(run, step, text, device=device, progress=progress)
    if json:
        print(dumps(dataclasses.asdict(inspected), ensure_ascii=False))
        return

    console = output_console()
    for sequence in inspected.sequences:
        console.print(terminal.token_text(sequence.read), "")
    names = [*inspected.sequences[0].losses]
    rows = [
        [
            item.read.title,
            str(len(item.read.tokens)),
            *(f"{item.losses[name]:.4g}" for name in names),
            f"{item.gradient_norm:.4g}",
        ]
        for item in inspected.sequences
    ]
    tokens = sum(len(sequence.read.tokens) for sequence in inspected.sequences)
    losses = (
        f"{inspected.losses[name]:.4g}" if name in inspected.losses else "–" for name in names
    )
    rows.append(["the whole step", str(tokens), *losses, f"{inspected.gradient_norm:.4g}"])
    title = f"Step {inspected.step:,}: {quantity(len(inspected.sequences), 'sequence(s)')}"
    columns = ("sequence", "tokens", *names, "gradient norm")
    options.show_tables(options.CommandTable(title, columns, rows))

    # What was repeated, and whether it is what the run recorded.
    summary = f"Steps {inspected.began + 1:,} to {inspected.step:,} were repeated, in one process"
    say(console, f"{summary}. Learning rate: {inspected.rate:.3g}.")
    if inspected.ranks > 1:
        say(
            console,
            f"The run had {inspected.ranks} ranks: sums are rounded in another order, and dropout "
            "draws anew; sequences and rates are the same.",
        )
    match inspected.difference:
        case None if inspected.compared:
            records = quantity(inspected.compared, "recorded gradient norm(s)")
            verdict = f"Equal to the bit: {records} of the run."
        case None:
            verdict = "The run recorded no gradient norm of these steps to compare with."
        case difference:
            verdict = (
                f"At step {difference.step:,} the run recorded a gradient norm of "
                f"{difference.recorded:.9g}, here it is {difference.repeated:.9g}."
            )
            if inspected.ranks == 1:
                verdict += " Another machine, number of threads, version or start changes it."
    say(console, verdict)


@options.documented_by(bothways.show)
def show(  # noqa: PLR0913 – one option per question
    source: str,
    *words: str,
    model: str | None = None,
    start: str | None = None,
    count: int | None = None,
    step: int = 1,
    layer: int | None = None,
    head: int | None = None,
    recipe: PretrainRecipe | None = None,
    config: Path | None = None,
    out: Path | None = None,
    json: bool = False,
) -> None:
    """Show what a model reads: sequences that a pre-training run is trained on, or a text.

    A token that is predicted has an arrow: [MASK]→dog.

    Parameters
    ----------
    source
        A folder made by `bothways corpus build`; with a text also a tokenizer or a model: a folder,
        the folder of a run, or a Hub id.
    words
        A text, or two for a pair, instead of the sequences of a corpus; further corpora; and
        settings as for pretrain, such as objective=masked_lm objective.masking.rate=0.3. A text
        without settings is shown as in use, without masks.
    head
        The head of the layer, from 1, whose attention is printed; default: the mean of all.
    out
        A file for an HTML page, instead of text.
    json
        Write a JSON object for each sequence, one a line, instead of text.
    """
    names, overrides = options.split_inputs(words)
    settings = options.settings_for(bothways.show, overrides)
    corpora = [name for name in names if os.path.isdir(name)]
    texts = [name for name in names if name not in corpora]
    for text in texts:
        if os.path.isfile(text):
            build = call("corpus build", text, tokenizer="FOLDER", out="CORPUS")
            fix = f"Give a sentence of it, or build a corpus: {build}"
            raise ConfigError("is a file, not a text", where=text, fix=fix)
    if len(texts) > 2:
        message = f"{len(texts)} texts are given, and a model reads one or a pair"
        raise ConfigError(message, where="words", fix="Put quotation marks around each text.")
    if corpora and texts:
        message = f"is a folder next to a text; a text is read by {source} alone"
        raise ConfigError(message, where=corpora[0], fix="Leave out one of them.")
    if head is not None and (layer is None or out is not None or json):
        message = "chooses what is printed of a layer"
        fix = "Add --layer N." if layer is None else "Leave it out: a page or JSON has all heads."
        raise ConfigError(message, where="head", fix=fix)
    if out is not None:
        check_output_path(out, [source, *([] if config is None else [config])])
    shown = bothways.show(
        [source, *corpora] if corpora else source,
        *texts,
        model=model,
        start=start,
        count=count,
        step=step,
        layer=layer,
        recipe=recipe,
        config=config,
        **settings,
    )
    for note in shown.notes:
        write_stderr(f"note: {note}")
    if out is not None:
        shown.save(out)
        write_stderr(f"The page is in {out}.")
    elif json:
        for sequence in shown.to_json():
            print(dumps(sequence, ensure_ascii=False))
    else:
        shown.print(output_console(), head)


Command = Literal["finetune", "pretrain", "features"]


def settings(
    prefix: str = "", /, *, command: Command | None = None, json: options.JsonOutput = False
) -> None:
    """List the settings of pretrain, finetune and features: default, values and meaning.

    adapt and plan take those of pretrain, sweep those of finetune, distil both. Defaults are those
    of the recipe modern, for pretrain with bert-base.

    Parameters
    ----------
    prefix
        A path or its beginning, such as training.optimizer, also from one of its dots, such as
        masking; or a common name, such as lr. By default all are listed.
    command
        The command whose settings are listed; default: all three.
    """
    chosen = {
        name: [s for s in listed if f".{prefix}" in f".{s.path}" or s.name == prefix]
        for name, listed in all_settings().items()
        if command in (None, name)
    }
    if not any(chosen.values()):
        every = itertools.chain(*all_settings().values())
        names = {name for s in every for name in (s.path, *s.path.split("."), s.name)}
        near = difflib.get_close_matches(prefix, names, 1)
        guess = f"; did you mean {near[0]}?" if near else ""
        fix = "bothways settings lists all."
        if prefix in get_args(Command):
            fix = f"For those of a command: --command {prefix}."
        raise ConfigError(f"no setting begins with {prefix!r}{guess}", where="prefix", fix=fix)
    console = output_console()
    if json:
        rows = [{"command": name, **vars(s)} for name, listed in chosen.items() for s in listed]
        say(console, dumps(rows, indent=1, ensure_ascii=False))
        return
    for heading, listed in chosen.items():
        if listed:
            say(console, f"{heading}:")
        for setting in listed:
            default = f" = {setting.default}" if setting.default else ""
            name = f" (or {setting.name})" if setting.name else ""
            kinds = f", for {', '.join(setting.kinds)}" if setting.kinds else ""
            say(console, f"  {setting.path}{default}{name}: {setting.values}{kinds}")
            say(console, f"      {setting.meaning}")


def all_settings() -> dict[str, list[Setting]]:
    """Return the settings by command, in the order of their declarations."""
    from bothways.finetuning.config import SHORTHANDS, FinetuneConfig
    from bothways.lab.features.run import FeatureConfig
    from bothways.model.families.catalogue import preset
    from bothways.pretraining.recipes import modern
    from bothways.training.run import TRAINING_NAMES

    features = FeatureConfig(model="MODEL", train="TRAIN", dev="DEV")
    return {
        "finetune": list_settings(FinetuneConfig(), SHORTHANDS),
        "pretrain": list_settings(modern(preset("bert-base")), TRAINING_NAMES),
        "features": list_settings(features),
    }
