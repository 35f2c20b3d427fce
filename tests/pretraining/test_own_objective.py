"""An objective that is defined outside the package is trained, saved and resumed."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from bothways.core.batch import Batch, LabelTargets, TokenTargets
from bothways.core.errors import ConfigError
from bothways.core.source import Sequence
from bothways.core.training_module import Loss, TrainingModule
from bothways.data.corpus import Corpus
from bothways.data.masking import Vocabulary
from bothways.data.segments import FullSentences
from bothways.hub.model_folder import load_model
from bothways.model.config import EncoderConfig
from bothways.model.heads import MaskedHead, PairHead, PoolerHead, TagHead
from bothways.model.kernels.cross_entropy import cross_entropy
from bothways.model.model import Model
from bothways.objectives.objective import ModelSpec, Objective
from bothways.pretraining.build import preflight
from bothways.pretraining.config import PretrainConfig
from bothways.pretraining.run import pretrain
from bothways.training.schedules import Steps
from toy_pretraining import small_run
from toy_training import equal, stop_at


@dataclass(frozen=True)
class ShuffledTokens(Objective):
    """Tells texts whose tokens were shuffled from texts as they are."""

    segments: FullSentences = FullSentences()
    share: float = 0.5

    kind = "shuffled_tokens"

    def models(self, encoder: EncoderConfig) -> dict[str, ModelSpec]:
        return {"model": ModelSpec(encoder, (PoolerHead(), PairHead()))}

    def prepare(
        self, sequence: Sequence, vocabulary: Vocabulary, rng: np.random.Generator
    ) -> Sequence:
        ids, label = sequence.ids.copy(), int(rng.random() < self.share)
        if label:
            ids[1:-1] = rng.permutation(ids[1:-1])
        targets = {"shuffled": LabelTargets(np.array([label], np.int64))}
        return dataclasses.replace(sequence, ids=ids, targets=targets)

    def training_module(
        self, models: Mapping[str, Model], vocabulary: Vocabulary
    ) -> TrainingModule:
        return ShuffledModule(models["model"])


class ShuffledModule(TrainingModule):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def saved(self) -> Mapping[str, Model]:
        return {"model": self.model}

    def weights(self, batch: Batch) -> dict[str, float]:
        return {"shuffled": float(batch.layout.sequences)}

    def forward(self, batch: Batch) -> Mapping[str, Loss]:
        x = self.model.encoder(batch).last
        logits = self.model.heads["pair"](self.model.heads["pooler"](x, batch.layout))
        labels = torch.as_tensor(batch.target("shuffled", LabelTargets).labels)
        total = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        return {"shuffled": Loss(total, (logits.argmax(1) == labels).sum())}


@dataclass(frozen=True)
class TokenClasses(Objective):
    """Tells the remainder of each token's id by 3: classes of tokens, which are no vocabulary."""

    segments: FullSentences = FullSentences()

    kind = "token_classes"

    def models(self, encoder: EncoderConfig) -> dict[str, ModelSpec]:
        return {"model": ModelSpec(encoder, (TagHead(3),))}

    def prepare(
        self, sequence: Sequence, vocabulary: Vocabulary, rng: np.random.Generator
    ) -> Sequence:
        targets = TokenTargets(np.arange(len(sequence)), sequence.ids.astype(np.int64) % 3)
        return dataclasses.replace(sequence, targets={"class": targets})

    def training_module(
        self, models: Mapping[str, Model], vocabulary: Vocabulary
    ) -> TrainingModule:
        return TokenClassModule(models["model"])


class TokenClassModule(ShuffledModule):
    def weights(self, batch: Batch) -> dict[str, float]:
        return {"class": float(len(batch.target("class", TokenTargets).ids))}

    def forward(self, batch: Batch) -> Mapping[str, Loss]:
        targets = batch.target("class", TokenTargets)
        rows = self.model.encoder(batch).last[torch.as_tensor(targets.index)]
        logits = self.model.heads["tags"](rows)
        return {"class": cross_entropy(logits, torch.as_tensor(targets.ids))}


@dataclass(frozen=True)
class TwoHeads(TokenClasses):
    """Has heads that no class of transformers has together."""

    def models(self, encoder: EncoderConfig) -> dict[str, ModelSpec]:
        return {"model": ModelSpec(encoder, (MaskedHead(), TagHead(3)))}


def config_for(
    corpus: Corpus, steps: int, objective: Objective = ShuffledTokens()
) -> PretrainConfig:
    return small_run(corpus, Steps(steps), objective=objective, training={"save": Steps(2)})


def test_it_is_trained_saved_and_resumed(corpus, tmp_path):
    whole = pretrain(config_for(corpus, 6), corpus, tmp_path / "whole")
    assert whole.metrics["held-out/loss/shuffled"] > 0
    assert whole.metrics["majority/accuracy/shuffled"] >= 0.5
    loaded = load_model(tmp_path / "whole" / "model").model
    assert set(loaded.heads) == {"pooler", "pair"}

    with pytest.raises(InterruptedError):
        pretrain(config_for(corpus, 6), corpus, tmp_path / "run", on_event=stop_at(5, "step"))
    again = pretrain(config_for(corpus, 6), corpus, tmp_path / "run", resume=True)
    assert equal(again.model, whole.model)
    assert equal(loaded, whole.model)


def test_classes_of_tokens_are_compared_with_the_most_frequent_class(corpus):
    metrics = pretrain(config_for(corpus, 1, TokenClasses()), corpus, None).metrics
    assert "unigram/loss/class" not in metrics, "a class is no token of the vocabulary"
    assert 1 / 3 < metrics["majority/accuracy/class"] < 1
    assert 0 < metrics["majority/loss/class"] < np.log(3)


def test_heads_that_no_class_of_transformers_has_are_noted(corpus):
    found = preflight(config_for(corpus, 1, TwoHeads()), corpus, None, torch.device("cpu"))
    said = [finding.what for finding in found if finding.severity == "note"]
    assert any("has no class with the heads masked, tags: only bothways" in what for what in said)


def test_models_that_cannot_be_probed_are_refused(corpus, tmp_path, monkeypatch):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"sentence_good": "The cat sees.", "sentence_bad": "The sees cat."}\n')
    probed = dataclasses.replace(config_for(corpus, 1), probes=(str(pairs),))
    with pytest.raises(ConfigError, match="probes: has minimal pairs, which need a model that"):
        pretrain(probed, corpus, None)
    monkeypatch.setattr(ShuffledModule, "saved", lambda _: {})
    with pytest.raises(ConfigError, match="probes: need a model that the run saves"):
        pretrain(probed, corpus, None)
