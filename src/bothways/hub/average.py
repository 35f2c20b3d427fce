"""The mean of the weights of several models: of checkpoints of a run, or of runs that began alike.

Sources: Izmailov et al. 2018 (checkpoints of one run); Wortsman et al. 2022 (fine-tuned models).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bothways.core.errors import FolderError
from bothways.core.files import check_not_input, file_digest, local_path, replace_folder
from bothways.core.terminal import listed, quantity
from bothways.hub.hf_config import RECORD, read_hf_config
from bothways.hub.model_card import Card, render_card
from bothways.hub.model_folder import check_replaceable, write_files, write_weights
from bothways.hub.resolve import (
    ADAPTER,
    MODEL_FILES,
    is_model_folder,
    modules_folder,
    object_in,
    resolve,
    resolve_run,
)
from bothways.hub.sentence_transformers import read_program_config
from bothways.hub.weight_files import open_weights
from bothways.model.families.weight_names import to_file_names
from bothways.text.tokenizer import Tokenizer
from bothways.training.checkpoint import Checkpoint, checkpoints, read_checkpoint
from bothways.training.saved_state import MANIFEST, WEIGHTS, read_weights

_OWN = "model."
"""The prefix of the saved model among the tensors of a checkpoint."""


def save_average(names: Sequence[str], target: Path) -> list[str]:
    """Save the mean of the weights, as `bothways.average`."""
    if len(names) < 2:
        run = local_path(names[0]) if names else None
        steps = checkpoints(run) if run else []
        if run and run in checkpoints(run.parent):
            steps = [run]  # the model of a checkpoint
        elif len(steps) < 2:
            message = f"has {quantity(len(steps), 'checkpoint(s)')}, and a mean is of two or more"
            message = message if run and run.is_dir() else "is not the folder of a run"
            fix = "Give several models, or the folder of a run with several checkpoints."
            if run and is_model_folder(run):
                message = "is one model, and a mean is of two or more"
            raise FolderError(message, where=run or "models", fix=fix)
        names = [str(folder) for folder in steps]
    check_not_input(target, names)
    check_replaceable(target)
    template, tensors = _mean(names)
    check_not_input(target, [template])  # the model of a run, whose checkpoints are given
    architecture = read_hf_config(template).architecture
    if architecture is None:
        message = "names a class of transformers that is not known here"
        raise FolderError(message, where=template, fix="Average models of the classes of a family.")
    files: dict[str, Any] = {
        file.relative_to(template).as_posix(): file.read_bytes()
        for pattern in MODEL_FILES
        if not pattern.startswith("model")  # its weights
        for path in template.glob(pattern)
        for file in (path, *path.rglob("*"))
        if file.is_file()
    }
    files[RECORD] = object_in(template / RECORD) | {"average": names}
    files[RECORD].pop("metrics", None)  # of the first model
    summary = f"Its weights are the mean of {quantity(len(names), 'model(s)')}: {', '.join(names)}."
    card = render_card(Card("An average of models", summary), architecture)
    with replace_folder(target) as hidden:
        write_files(hidden, files, card)
        write_weights(hidden / WEIGHTS, tensors)
    return [*names]


def _mean(names: Sequence[str]) -> tuple[Path, dict[str, Tensor]]:
    """Return the model folder of the first model, and the mean of each of its tensors."""
    folder, read_tensor = _open(names[0])
    tensors = {tensor: read_tensor(tensor) for tensor in open_weights(folder).shapes}
    # Sums in float64: the mean of equal models is the model to the bit.
    totals = {name: value.double() for name, value in tensors.items() if value.is_floating_point()}
    for source in names[1:]:
        other, read_tensor = _open(source)
        if other != folder:
            identity, other_identity = _identity(folder), _identity(other)
            names_of_both = {**identity, **other_identity}
            differs = [n for n in names_of_both if identity.get(n) != other_identity.get(n)]
            vocabulary = Tokenizer.load(folder).difference(Tokenizer.load(other))
            if differs or vocabulary:
                details = listed(differs) or f"its vocabulary: {vocabulary}"
                message = f"differs from {folder} in {details}"
                fix = "Average models of one configuration, vocabulary and set of labels."
                raise FolderError(message, where=other, fix=fix)
        for name, value in tensors.items():
            if name in totals:
                totals[name] += read_tensor(name)
            elif not torch.equal(value, read_tensor(name)):
                message = f"differs from {names[0]} in {name}, which has no mean"
                raise FolderError(message, where=source, fix="Average models of one training.")
    means = {name: (total / len(names)).to(tensors[name].dtype) for name, total in totals.items()}
    return folder, {name: value.contiguous() for name, value in {**tensors, **means}.items()}


def _open(name: str) -> tuple[Path, Callable[[str], Tensor]]:
    """Return a model folder, of a checkpoint its run's, and the function that reads tensors."""
    path = local_path(name)
    if not (path / MANIFEST).is_file():
        folder = resolve(resolve_run(name))
        if (folder / ADAPTER).is_file():
            message = "is an adapter, and the mean of low-rank changes is not the mean of weights"
            fix = "Save its model first: bothways.save_model of bothways.load_model(…)."
            raise FolderError(message, where=folder, fix=fix)
        if modules_folder(folder) != folder:
            message = "is in a folder of sentence-transformers, whose other parts would be lost"
            fix = "Save that folder with a newer sentence-transformers first."
            raise FolderError(message, where=folder, fix=fix)
        return folder, open_weights(folder).read
    folder = path.absolute().parent / "model"
    if not folder.is_dir():
        message = "the run of this checkpoint is not finished: it has no folder model/"
        raise FolderError(message, where=path, fix="Finish the run, with a lower until.")
    checkpoint = read_checkpoint(path)
    advice = "Average the model folders of runs instead."
    if _bases(folder, checkpoint) != _bases(folder):
        message = "has other bases of rotary positions than the model of its run"
        raise FolderError(message, where=path, fix="Take checkpoints of the last phase.")
    if layers := _layer_files(folder):
        names = listed(str(file.relative_to(folder)) for file in layers)
        message = f"is of a model with {names}, whose weights checkpoints hold elsewhere"
        raise FolderError(message, where=path, fix=advice)
    keys, state = read_hf_config(folder).keys, dict(read_weights(path))
    own_tensors = {key.removeprefix(_OWN): state[key] for key in state if key.startswith(_OWN)}
    named = to_file_names(keys, own_tensors)
    named |= {key.removeprefix(keys.prefix): tensor for key, tensor in named.items()}

    def read_tensor(tensor: str) -> Tensor:
        """Return a tensor of the checkpoint under its name in the model folder."""
        if tensor not in named:
            message = f"has no tensor for {tensor}, which the model of its run has"
            raise FolderError(message, where=path, fix=advice)
        return named[tensor]

    return folder, read_tensor


def _bases(folder: Path, checkpoint: Checkpoint | None = None) -> list[float] | None:
    """Return the rotary base of each layer, of a checkpoint in its phase; None without bases."""
    encoder = read_hf_config(folder).encoder
    bases = getattr(encoder.position, "bases", None)
    if bases and checkpoint and (phases := checkpoint.config.get("phases")):
        own = phases[checkpoint.progress.phase]["bases"]
        bases = own or checkpoint.config["encoder"]["position"]["bases"]
    return bases and [bases[layer % len(bases)] for layer in range(encoder.depth)]


def _identity(folder: Path) -> dict[str, Any]:
    """Return the properties that averaged models share, by name: all but the values of tensors.

    Dropout, the start and the id of padding do not change what a trained model computes.
    """
    config = read_hf_config(folder)
    outputs = {key: config.raw.get(key) for key in ("architectures", "id2label", "problem_type")}
    encoder = {
        name: value
        for name, value in vars(config.encoder).items()
        if name not in ("dropout", "initial_range", "pad")
    }
    # Modules of sentence-transformers are copied. Its releases write other fields for one pooling.
    program = read_program_config(folder, config.encoder.max_positions)
    modules = {} if program is None else {**vars(program)}
    for name in ("length", "prompts", "prompt_name"):
        modules.pop(name, None)
    further = {str(file.relative_to(folder)): file_digest(file) for file in _layer_files(folder)}
    return {**outputs, **encoder, **open_weights(folder).shapes, **modules, **further}


def _layer_files(folder: Path) -> list[Path]:
    """Return the weight files of further layers of sentence-transformers."""
    return [*folder.glob("[0-9]_*/*.safetensors"), *folder.glob("[0-9]_*/*.bin")]
