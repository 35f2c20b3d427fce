"""`bothways evaluate MODEL CORPUS`: each model is scored by what its heads have learned."""

import dataclasses
import json
from pathlib import Path

import pytest

from bothways.cli.main import app
from bothways.core.errors import BothwaysError, ConfigError, FolderError
from bothways.data.corpus import Corpus
from bothways.data.loader import TokenBudget
from bothways.data.masking import Masking
from bothways.hub.model_folder import save_model
from bothways.model.config import EncoderConfig
from bothways.model.families.catalogue import preset
from bothways.model.heads import MaskedHead, PairHead, PoolerHead
from bothways.model.model import Model
from bothways.objectives.objective import Objective
from bothways.objectives.replaced_tokens import ReplacedTokens
from bothways.objectives.sentence_order import MaskedLMSentenceOrder
from bothways.pretraining.build import fit_to_corpus
from bothways.pretraining.config import PretrainConfig, PretrainPhase
from bothways.pretraining.evaluation import scored_objective
from bothways.pretraining.run import pretrain
from bothways.training.optimizers import AdamW
from bothways.training.run import Training
from bothways.training.schedules import Constant, Steps

HEADS = (MaskedHead(), PoolerHead(), PairHead())


def shape(corpus: Corpus, name: str = "bert-tiny") -> EncoderConfig:
    small = dataclasses.replace(preset(name), width=32, depth=2, heads=2, intermediate_size=64)
    return fit_to_corpus(small, corpus.tokenizer)


def trained(
    corpus: Corpus, objective: Objective, folder: Path, name: str = "bert-tiny"
) -> dict[str, float]:
    """A run of one update; its metrics at the end."""
    run = PretrainConfig(
        shape(corpus, name), Training(Steps(1), AdamW(), Constant(), precision="fp32"), objective,
        (PretrainPhase(32),), TokenBudget(256), held_out=0.1, evaluation_tokens=400,
    )  # fmt: skip
    return dict(pretrain(run, corpus, folder).metrics)


def scored(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, float]:
    app(["evaluate", *words, "--length", "32", "--json"], result_action="return_value")
    found: dict[str, float] = json.loads(capsys.readouterr().out)
    return found


def test_a_model_of_sentence_order_is_scored_on_the_order(corpus, tmp_path, capsys):
    """More than half of the pairs of next sentence prediction are random; half of these are swapped."""
    trained(corpus, MaskedLMSentenceOrder(), tmp_path / "run")
    assert isinstance(scored_objective(str(tmp_path / "run")), MaskedLMSentenceOrder)
    found = scored(capsys, str(tmp_path / "run"), str(corpus.folder))
    assert found["majority/accuracy/pair"] < 0.53


@pytest.mark.parametrize(
    ("name", "kind"), [("albert-base", "masked_lm_sop"), ("bert-tiny", "masked_lm_nsp")]
)
def test_without_a_record_the_family_says_what_pairs_are(name, kind, corpus, tmp_path):
    save_model(tmp_path / "model", Model(shape(corpus, name), HEADS), corpus.tokenizer)
    assert scored_objective(str(tmp_path / "model")).kind == kind


def test_a_discriminator_is_scored_with_the_generator_of_its_run(corpus, tmp_path, capsys):
    trained(corpus, ReplacedTokens(masking=Masking()), tmp_path / "run", "electra-small")
    found = scored(capsys, str(tmp_path / "run"), str(corpus.folder))
    assert {"f1/replaced", "entropy/replaced", "loss/masked"} <= found.keys()
    (tmp_path / "run" / "model").rename(tmp_path / "alone")
    with pytest.raises(ConfigError, match="the generator that replaces them is not next to it"):
        scored_objective(str(tmp_path / "alone"))


def test_a_model_without_a_head_for_tokens_is_one_message(corpus, tmp_path):
    save_model(tmp_path / "bare", Model(shape(corpus), ()), corpus.tokenizer)
    with pytest.raises(FolderError, match="has no head that predicts tokens"):
        scored_objective(str(tmp_path / "bare"))


@pytest.mark.parametrize(
    "words",
    [["--report", "page.html"], ["--precision", "int8"], ["--task", "tag"], ["variant=word_l2r"]],
)
def test_options_that_do_nothing_with_a_corpus_are_refused(words, corpus, tmp_path):
    command = ["evaluate", str(tmp_path / "model"), str(corpus.folder), *words]
    with pytest.raises(BothwaysError, match="does nothing with a corpus"):
        app(command, result_action="return_value")
