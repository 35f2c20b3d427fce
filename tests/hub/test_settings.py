"""Settings of config.json are as strict as tensors: used, known to be irrelevant, listed or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from bothways.core.errors import FolderError
from bothways.hub.hf_config import read_hf_config
from bothways.hub.model_folder import load_model
from bothways.model.families.catalogue import FAMILIES
from drawn_settings import draw_settings
from model_folders import change_settings, folder_of, peer

families = pytest.mark.parametrize("family", FAMILIES, ids=[f.model_type for f in FAMILIES])


def written(folder: Path, settings: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


@families
@pytest.mark.parametrize("seed", range(4))
def test_every_setting_that_transformers_writes_is_known(family, seed, tmp_path):
    config = transformers.CONFIG_MAPPING[family.model_type](
        **draw_settings(family.model_type, seed)
    )
    full = json.loads(config.to_json_string(use_diff=False))
    for settings in (full, json.loads(config.to_json_string())):
        settings["model_type"] = family.model_type
        assert read_hf_config(written(tmp_path / "model", settings)).unknown == {}


@families
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("qk_norm", True),
        ("sliding_window", 128),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("pruned_heads", {"0": [1]}),
        ("num_key_value_heads", 3),
    ],
)
def test_a_setting_that_changes_outputs_is_refused(family, key, value, tmp_path):
    settings = draw_settings(family.model_type, 1) | {"model_type": family.model_type}
    with pytest.raises(FolderError, match=r"config\.json: .*") as caught:
        read_hf_config(written(tmp_path / "model", settings | {key: value}))
    assert key.removeprefix("num_") in str(caught.value) or "rope_type" in str(caught.value)
    counted = family.model_type == "eurobert" and key == "num_key_value_heads"
    for off in (None,) if counted else (None, False, {}):
        if key != "rope_scaling" or off != {}:
            read_hf_config(written(tmp_path / "model", settings | {key: off}))


def test_an_unknown_setting_is_in_the_load_report(tmp_path, caplog):
    folder = folder_of(peer("Bert", "Model"), tmp_path / "theirs")
    assert load_model(folder).report.unknown_settings == {}
    change_settings(folder, use_cache=False)
    assert load_model(folder).report.warnings == caplog.messages == []
    change_settings(folder, residual_gain=0.5)
    report = load_model(folder).report
    assert report.unknown_settings == {"residual_gain": 0.5}
    line = "config.json has 1 unknown setting, not used: residual_gain = 0.5"
    assert line in str(report).splitlines()
    assert caplog.messages == [f"{folder}: {line}"]


def test_unused_layers_are_a_warning(tmp_path, caplog):
    """A head that was not requested is none."""
    folder = folder_of(peer("Bert", "ForMaskedLM"), tmp_path / "theirs")
    load_model(folder, [])
    assert caplog.messages == []
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    change_settings(folder, num_hidden_layers=layers - 1)
    load_model(folder)
    assert [message.split(":")[1] for message in caplog.messages] == [" 16 tensors not used"]
