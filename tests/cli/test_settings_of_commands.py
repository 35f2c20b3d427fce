"""Words of a command line become arguments of the public functions."""

from typing import Any, get_args

import pytest

import bothways
from bothways.cli.options import settings_for
from bothways.core.errors import ConfigError
from bothways.finetuning import FinetuneRecipe
from bothways.finetuning.config import RECIPES as FINETUNING
from bothways.pretraining import PretrainRecipe
from bothways.pretraining.recipes import RECIPES as PRETRAINING
from bothways.training_runs import finetune_settings


def test_options_and_words_are_settings_and_one_of_a_name():
    settings = settings_for(bothways.finetune, ["batch.n=8"], lr=2e-3, group=None)
    assert settings == {"lr": 2e-3, "batch.n": "8"}
    with pytest.raises(ConfigError) as error:
        settings_for(bothways.finetune, ["lr=1e-3"], lr=2e-3)
    assert error.value.where == "lr"


@pytest.mark.parametrize("word", ["device=cpu", "out=run", "progress=false"])
def test_argument_is_not_a_setting(word):
    with pytest.raises(ConfigError) as error:
        settings_for(bothways.finetune, [word])
    assert error.value.where == word.partition("=")[0]


def test_dotted_settings_are_merged_in_their_order():
    words = ["task.smoothing=0.1", "schedule=cosine", "warmup=0.2", "seed=3"]
    settings = settings_for(bothways.finetune, words, until="2 epochs")
    made: Any = finetune_settings("m", "t.tsv", None, "classify", settings)[0]
    assert (made.task.smoothing, made.seed, str(made.training.until)) == (0.1, 3, "2 epochs")
    assert (made.training.schedule.kind, made.training.schedule.warmup) == ("cosine", 0.2)


def test_recipes_have_the_names_of_their_annotations():
    assert get_args(PretrainRecipe) == tuple(PRETRAINING)
    assert get_args(FinetuneRecipe) == tuple(FINETUNING)


def test_dev_data_of_a_corpus_are_refused(tmp_path):
    with pytest.raises(ConfigError) as error:
        bothways.distil("teacher", tmp_path, dev=0.2)
    assert error.value.where == "dev"
