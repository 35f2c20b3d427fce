"""The mean of the weights of several models: of checkpoints of a run, or of runs that began alike.

Sources: Izmailov et al. 2018 (checkpoints of one run); Wortsman et al. 2022 (fine-tuned models).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bothways.core.errors import FolderError
from bothways.core.files import check_not_input, read_object, replace_folder
from bothways.core.terminal import listed
from bothways.hub.hf_config import RECORD, read_hf_config
from bothways.hub.model_folder import check_replaceable, write_files
from bothways.hub.resolve import ADAPTER, PICKLE_FILES, resolve, resolve_run
from bothways.hub.weight_files import open_weights
from bothways.model.families.weight_names import to_file_names
from bothways.text.tokenizer import Tokenizer
from bothways.training.checkpoint import checkpoints, read_checkpoint
from bothways.training.saved_state import MANIFEST, WEIGHTS

_OWN = "model."
"""The prefix of the saved model among the tensors of a checkpoint."""


def save_average(names: Sequence[str], target: Path) -> list[str]:
    """Save the mean of the weights, as `bothways.average`."""
    if len(names) == 1:
        names = [str(folder) for folder in checkpoints(Path(names[0]))] or names
    if len(names) < 2:
        message = "one model has no average"
        fix = "Give several, or the folder of a run with several checkpoints."
        raise FolderError(message, where=names[0] if names else "models", fix=fix)
    check_not_input(target, names)
    check_replaceable(target)
    template, tensors = _mean(names)
    with replace_folder(target) as hidden:
        for file in template.iterdir():
            if file.name.startswith(("model.", "model-")) or file.name in PICKLE_FILES:
                continue
            copy = shutil.copytree if file.is_dir() else shutil.copyfile
            copy(file, hidden / file.name)
        record = read_object(hidden / RECORD, FolderError) if (hidden / RECORD).is_file() else {}
        write_files(hidden, {RECORD: record | {"average": names}})
        save_file(tensors, hidden / WEIGHTS, metadata={"format": "pt"})
        # safetensors creates files that only their owner can read, whatever the umask.
        (hidden / WEIGHTS).chmod((hidden / RECORD).stat().st_mode)
        card = hidden / "README.md"
        text = card.read_text("utf8") if card.is_file() else "# An averaged model\n"
        note = f"## Weights\n\nThe mean of {len(names)} models: {', '.join(names)}.\n"
        card.write_text(f"{text.rstrip()}\n\n{note}", encoding="utf8")
    return [*names]


def _mean(names: Sequence[str]) -> tuple[Path, dict[str, Tensor]]:
    """Return the model folder of the first model, and the mean of each of its tensors."""
    folder, read = _open(names[0])
    tensors = {tensor: read(tensor) for tensor in open_weights(folder).shapes}
    totals = {name: value.double() for name, value in tensors.items() if value.is_floating_point()}
    for source in names[1:]:
        other, read = _open(source)
        if other != folder:
            _require_alike(folder, other)
        for name, value in tensors.items():
            if name in totals:
                totals[name] += read(name)
            elif not torch.equal(value, read(name)):
                message = f"differs from {names[0]} in {name}, which has no mean"
                raise FolderError(message, where=source, fix="Average models of one training.")
    means = {name: (total / len(names)).to(tensors[name].dtype) for name, total in totals.items()}
    return folder, {name: value.contiguous() for name, value in {**tensors, **means}.items()}


def _open(name: str) -> tuple[Path, Callable[[str], Tensor]]:
    """Return a model folder and what reads its tensors; of a checkpoint, those of its run."""
    path = Path(name)
    if not (path / MANIFEST).is_file():
        folder = resolve(resolve_run(name))
        if (folder / ADAPTER).is_file():
            message = "is an adapter, and the mean of low-rank changes is not the mean of weights"
            fix = "Save its model first: bothways.save_model of bothways.load_model(…)."
            raise FolderError(message, where=folder, fix=fix)
        return folder, open_weights(folder).read
    folder = path.absolute().parent / "model"
    if not folder.is_dir():
        message = "the run of this checkpoint is not finished: it has no folder model/"
        raise FolderError(message, where=path, fix="Finish the run, with a lower until.")
    read_checkpoint(path)  # raises CheckpointError if it is damaged
    advice = "Average the model folders of runs instead."
    if not (path / WEIGHTS).is_file():
        message = "holds the parts of several ranks, which only a run reads"
        raise FolderError(message, where=path, fix=advice)
    keys, state = read_hf_config(folder).keys, load_file(path / WEIGHTS)
    own = {key.removeprefix(_OWN): state[key] for key in state if key.startswith(_OWN)}
    named = to_file_names(keys, own)
    named |= {key.removeprefix(keys.prefix): tensor for key, tensor in named.items()}

    def read(tensor: str) -> Tensor:
        """Return a tensor of the checkpoint under its name in the model folder."""
        if tensor not in named:
            message = f"has no tensor for {tensor}, which the model of its run has"
            raise FolderError(message, where=path, fix=advice)
        return named[tensor]

    return folder, read


_SETTINGS = ("architectures", "id2label", "problem_type", "hidden_act", "rope_parameters")
"""What must be equal in `config.json`, besides the shapes of tensors."""


def _require_alike(folder: Path, other: Path) -> None:
    """Raise FolderError if two models differ in more than their weights."""
    shapes, others = open_weights(folder).shapes, open_weights(other).shapes
    first, second = (read_hf_config(path).raw for path in (folder, other))
    differs = [name for name in _SETTINGS if first.get(name) != second.get(name)]
    differs += sorted(name for name in {**shapes, **others} if shapes.get(name) != others.get(name))
    vocabulary = Tokenizer.load(folder).difference(Tokenizer.load(other))
    if differs or vocabulary:
        message = f"differs from {folder} in {listed(differs) or f'its vocabulary: {vocabulary}'}"
        fix = "Average models of one shape, vocabulary and set of labels."
        raise FolderError(message, where=other, fix=fix)
