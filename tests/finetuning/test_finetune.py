"""Fine-tuning from files: what comes out opens in transformers and here, an interrupted run ends where an unbroken one does,
and every mistake is one message."""

import itertools
import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import TCPStore

import bothways
from bothways.core.config import reader as configs
from bothways.core.errors import BothwaysError, ConfigError, FolderError, ResourceError
from bothways.core.report.sections import readable_number
from bothways.finetuning import run as fitting
from bothways.finetuning.config import FinetuneConfig, finetune_adam
from bothways.finetuning.lora import ScaledLinear
from bothways.finetuning.prepare import PreparedRun, prepare_run, remarks
from bothways.finetuning.run import FinetuneResult, finetune
from bothways.finetuning.stability import Stability
from bothways.hub.model_folder import load_model, save_model
from bothways.model.config import EncoderConfig
from bothways.model.families.catalogue import preset
from bothways.model.heads import Head, LabelHead, PoolerHead, SpanHead, token_head
from bothways.model.model import Model
from bothways.model.positions import Learned
from bothways.prediction.opening import open_task, open_task_model
from bothways.tasks.base import examples_fingerprint
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.multilabel.task import MultilabelTask
from bothways.tasks.question_answering.task import QuestionAnsweringTask
from bothways.tasks.regression.task import RegressionTask
from bothways.tasks.reranking.task import RerankingTask
from bothways.tasks.text_task import TextColumns
from bothways.training.optimizers import AdamW
from bothways.training.schedules import Epochs, Steps
from heard_progress import Heard
from toy_folder import (
    VOCABULARY,
    file_settings,
    make_data,
    make_examples,
    make_folder,
    make_rows,
    make_tokenizer,
)
from toy_task import fit_on_rank, fit_task, interrupt_score
from toy_training import equal, metric_lines, on_ranks, signal_at

FAST = replace(finetune_adam(), until=Epochs(5.0), optimizer=AdamW(lr=3e-3), precision="fp32")


TINY = EncoderConfig(len(VOCABULARY), 16, 1, 2, 32, position=Learned(32))


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> FinetuneConfig:
    folder = tmp_path_factory.mktemp("files")
    return file_settings(make_folder(folder / "bert"), folder, 320, 80, training=FAST)


@pytest.fixture(scope="module")
def done(files, tmp_path_factory, drawn_pages) -> tuple[FinetuneResult, Path, str]:
    """A finished run with its page, its folder, and what it said."""
    heard, folder = Heard(), tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "_write_report", drawn_pages["bothways.finetuning.run"])
        result = finetune(files, folder, device="cpu", progress=heard)
    return result, folder, heard.text


def test_a_separable_task_is_learned_and_the_best_checkpoint_kept(done, files):
    result, folder, said = done
    assert result.metrics["accuracy"] > 0.95
    scored = [line["dev/accuracy"] for line in metric_lines(folder) if "dev/accuracy" in line]
    assert len(scored) == 5
    assert result.metrics["accuracy"] == max(scored)
    assert (result.progress.steps, result.progress.epochs) == (50, 5.0)
    assert configs.load(FinetuneConfig, file=folder / "config.toml") == files
    assert "note: always answering" in said
    assert "note: the columns are guessed: text = 'sentence', label = 'label'" in said
    assert [finding.check for finding in result.findings] == ["overlap", "balance"]


def test_what_is_saved_opens_in_transformers_with_equal_outputs(done):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    result, _, _ = done
    opened = AutoModelForSequenceClassification.from_pretrained
    theirs, report = opened(result.folder, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(result.folder)
    assert not any(report.values())
    assert type(theirs).__name__ == "BertForSequenceClassification"
    assert theirs.config.id2label == {0: "neg", 1: "pos"}
    assert theirs.config.problem_type == "single_label_classification"
    classifier, examples = open_task(str(result.folder)), make_examples(30, 5)
    for example, prediction in classifier.predict_examples(examples):
        with torch.no_grad():
            cut = {"truncation": True, "max_length": 16, "return_tensors": "pt"}
            logits = theirs(**tokenizer(example.text, **cut)).logits
        expected = dict(zip(("neg", "pos"), logits[0].double().softmax(0).tolist(), strict=True))
        assert prediction.probabilities == pytest.approx(expected, abs=1e-5)


def test_the_record_says_how_the_model_was_made(done, files):
    result, folder, _ = done
    record = json.loads((folder / "model" / "bothways.json").read_text())
    digest = examples_fingerprint(make_examples(320, 0))
    train = {"name": files.train, "examples": 320, "sha256": digest}
    assert record["data"]["train"] == train
    assert record["data"]["dev"]["examples"] == 80
    assert record["metrics"] == dict(result.metrics)
    assert configs.read(FinetuneConfig, record["settings"]) == files
    card = (folder / "model" / "README.md").read_text()
    assert "bert fine-tuned on train.tsv" in card
    assert f"| dev accuracy | {result.metrics['accuracy']:.4g} |" in card
    assert "| optimizer | adamw, lr 0.003, " in card
    assert f"| train | {files.train}, 320 examples, sha256 {digest} |" in card
    assert "- It was trained on sequences of at most 16 tokens." in card
    assert "- This is one run, with seed 0; other seeds" in card
    assert "- The weights were selected by the metrics above" in card


def test_the_run_folder_has_a_report_on_the_dev_data(done):
    result, folder, _ = done
    page = (folder / "report.html").read_text(encoding="utf8")
    assert f"accuracy {readable_number(result.metrics['accuracy'])} on 80 examples" in page
    assert "The hardest examples" in page
    assert "run.training.optimizer.lr" in page


def test_evaluating_the_folder_gives_the_metrics_of_the_run(done, files):
    result, folder, _ = done
    for place in (folder, folder / "model"):
        classifier = open_task(str(place))
        metrics = classifier.evaluate(classifier.read(files.dev, labelled=True))
        assert metrics == pytest.approx(dict(result.metrics), rel=1e-5)
        assert classifier.task_model.task.columns == TextColumns("sentence", None, "label")
        assert classifier.task_model.length == 16
    assert open_task_model(str(folder), length=8).length == 8


def test_an_interrupted_run_ends_where_an_unbroken_one_does(done, files, tmp_path, monkeypatch):
    interrupt_score(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt, match="Saved after step 20"):
        finetune(files, tmp_path, device="cpu")
    with pytest.raises(ResourceError, match="holds the checkpoints of an earlier run"):
        finetune(files, tmp_path, device="cpu")
    moved = shutil.copy(files.train, tmp_path / "moved.tsv")
    result = finetune(replace(files, train=str(moved)), tmp_path, resume=True, device="cpu")
    assert result.metrics == done[0].metrics
    assert equal(result.task_model, done[0].task_model)
    other = str(make_folder(tmp_path / "other", seed=1))
    for changes, message in (
        ({"seed": 1}, "seed was 0, is 1"),
        ({"model": other}, r"data\.model is not the same"),
    ):
        with pytest.raises(BothwaysError, match=rf"is of another run: .*{message}") as caught:
            finetune(replace(files, **changes), tmp_path, resume=True, device="cpu")
        assert str(tmp_path / "model") in str(caught.value.fix)


def test_without_dev_data_the_last_weights_are_saved(files, tmp_path):
    heard = Heard()
    settings = replace(files, dev=None, training=replace(FAST, until=Steps(3)))
    result = finetune(settings, tmp_path, device="cpu", progress=heard)
    assert result.metrics == {}
    assert "note: without dev data the last weights are kept, and nothing is measured" in heard.text
    assert equal(load_model(tmp_path / "model").model, result.task_model.model)


def test_every_flaw_is_in_one_message(files, tmp_path):
    (tmp_path / "train.csv").write_text("text,label\ngood,pos\n,neg\nbad,\nfine,pos\n")
    (tmp_path / "dev.csv").write_text("text,label\ngood,odd\n")
    train, dev = (str(tmp_path / f"{part}.csv") for part in ("train", "dev"))
    settings = replace(files, train=train, dev=dev, length=64)
    with pytest.raises(BothwaysError) as caught:
        finetune(settings, tmp_path / "run", device="cpu")
    message = str(caught.value).replace(str(tmp_path), "")
    for part in (
        "4 errors", "length: sequences of 64 tokens", "32 positions", "empty text: /train.csv:3",
        "no label (empty, null or NaN): /train.csv:4", "no training example: /dev.csv:2 ('odd')",
    ):  # fmt: skip
        assert part in message
    assert not list((tmp_path / "run").glob("step-*"))


@pytest.mark.parametrize(
    "shape",
    [
        TINY,
        replace(preset("gpt2"), vocab=TINY.vocab, width=16, depth=1, heads=2, intermediate_size=64),
    ],
    ids=["bert", "gpt2"],
)
def test_a_pooler_that_the_model_was_saved_without_starts_at_random_with_a_note(
    shape, files, tmp_path
):
    model, tokenizer = Model(shape, (token_head(shape),)), make_tokenizer(tmp_path / "tokenizer")
    save_model(tmp_path / "lm", model, tokenizer)
    short = replace(FAST, until=Steps(2))
    settings, heard = replace(files, model=str(tmp_path / "lm"), training=short), Heard()
    done = finetune(settings, tmp_path / "run", device="cpu", progress=heard)
    assert done.folder == tmp_path / "run" / "model"
    assert heard.text.count(f"note: {settings.model} has no pooler to start from") == 1
    ready = prepare_run(replace(settings, fresh=("pooler",)), None, torch.device("cpu"))
    assert "has no pooler" not in "".join(remarks(ready))

    loaded, heard = load_model(tmp_path / "lm"), Heard()
    data = make_data(tmp_path / "data", 30, 9)
    pulled = replace(settings, stability=Stability(pull=0.1))
    again = fit_task(loaded.model, data, pulled, device="cpu", progress=heard)
    assert again.metrics
    assert heard.text.count("note: the model has no pooler to start from") == 1


def test_a_pooler_that_was_only_saved_for_the_class_is_noted_as_new(files, tmp_path):
    """BertModel has one in transformers, whether or not anything has trained it."""
    for name, heads, notes in (("bare", (), 1), ("pooled", (PoolerHead(),), 0)):
        saved(tmp_path / name, *heads)
        assert "pooler" in load_model(tmp_path / name).model.heads
        short, heard = replace(FAST, until=Steps(1)), Heard()
        settings = replace(files, model=str(tmp_path / name), training=short)
        finetune(settings, device="cpu", progress=heard)
        assert heard.text.count("has no pooler to start from") == notes


@pytest.mark.parametrize("lost", ["bert.pooler", "bert.pooler.dense.bias"])
def test_a_model_that_lost_its_pooler_is_refused(lost, files, tmp_path):
    model = shutil.copytree(files.model, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    left = {name: tensor for name, tensor in tensors.items() if not name.startswith(lost)}
    save_file(left, model / "model.safetensors", {"format": "pt"})
    settings = replace(files, model=str(model))
    with pytest.raises(FolderError, match=r"does not hold the .*pooler[\s\S]* fresh=\['pooler'\]"):
        finetune(settings, tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
    given = replace(settings, fresh=("pooler",), training=replace(FAST, until=Steps(2)))
    assert finetune(given, tmp_path / "run", device="cpu").folder == tmp_path / "run" / "model"


def saved(folder: Path, *heads: Head, **names: Any) -> Model:
    torch.manual_seed(3)
    model = Model(TINY, heads)
    save_model(folder, model, make_tokenizer(folder.parent / "tokenizer"), **names)
    return model


def prepared(settings: FinetuneConfig, model: Path, **data: Any) -> PreparedRun:
    return prepare_run(replace(settings, model=str(model)), None, torch.device("cpu"), **data)


def test_the_head_of_a_folder_with_the_labels_of_the_data_is_trained_further(files, tmp_path):
    own = ("pos", "neg")  # in another order than the task's, which clients go by
    model = saved(folder := tmp_path / "own", PoolerHead(), LabelHead(2), labels=own)
    ready = prepared(files, folder)
    assert equal(ready.task_model.model.heads["labels"], model.heads["labels"])
    assert (ready.fresh, ready.task_model.labels) == ((), own)
    pairs = zip(ready.data.train, ready.data.train_examples, strict=True)
    targets = {(item.sequences[0].targets["label"].labels.item(), e.label) for item, e in pairs}
    assert targets == {(0, "pos"), (1, "neg")}
    assert "trained further" in "".join(remarks(ready))

    # 3 of one label to 1 of the other: n / (2 · count) each, in the order of the folder.
    rows = [{"text": "bad", "label": "neg"}] * 3 + [{"text": "good", "label": "pos"}]
    balanced = replace(files, task=ClassificationTask(weighting="balanced"), dev=None)
    weighted = prepared(balanced, folder, train=rows * 8)
    assert weighted.task_model.task.weighting == pytest.approx((2.0, 2 / 3))

    fresh = prepared(replace(files, fresh=("head",)), folder)
    assert (fresh.fresh, fresh.task_model.labels) == (("labels",), ("neg", "pos"))
    assert not equal(fresh.task_model.model.heads["labels"], model.heads["labels"])

    for name, count, names in (
        ("other", 2, {"labels": ("no", "yes")}),
        ("unnamed", 2, {}),
        ("more", 3, {}),  # outputs than the data has names
        ("flags", 2, {"labels": own, "problem": "multi_label_classification"}),
    ):
        saved(tmp_path / name, PoolerHead(), LabelHead(count), **names)
        ready = prepared(files, tmp_path / name)
        assert (ready.fresh, ready.task_model.labels) == (("labels",), ("neg", "pos"))
        said = "".join(remarks(ready))
        assert "a new one starts at random: " in said
        assert ("id2label" in said) == (name == "unnamed")


def test_a_head_for_one_label_is_not_trained_further_for_another(tmp_path):
    names: Any = {"labels": ("toxic",), "problem": "multi_label_classification"}
    saved(tmp_path / "toxic", PoolerHead(), LabelHead(1), **names)
    settings = FinetuneConfig(FAST, task=MultilabelTask())
    for label, fresh in (("spam", ("labels",)), ("toxic", ())):
        rows = [{"text": "good", "labels": []}, {"text": "bad", "labels": [label]}]
        ready = prepared(settings, tmp_path / "toxic", train=rows * 8)
        assert (ready.fresh, ready.task_model.labels) == (fresh, (label,))


def test_a_head_of_scores_far_from_0_is_trained_further_in_their_units(tmp_path):
    model = saved(folder := tmp_path / "prices", PoolerHead(), LabelHead(1))
    rows = [{"text": "good", "label": 900}, {"text": "bad", "label": 100}] * 8
    ready = prepared(FinetuneConfig(FAST, task=RegressionTask()), folder, train=rows)
    dense = ready.task_model.model.heads["labels"].dense
    assert isinstance(dense, ScaledLinear)
    assert dense.scale == (500, 400)
    vectors = torch.randn(4, TINY.width)
    expected = model.heads["labels"].dense(vectors)
    torch.testing.assert_close(dense(vectors), expected, atol=1e-4, rtol=0)


def test_a_head_of_one_output_or_without_labels_is_trained_further(tmp_path):
    question = {"question": "good ?", "context": "bad good", "answers": ["good"]}
    for task, heads, rows in (
        (
            RegressionTask(),
            (PoolerHead(), LabelHead(1)),
            [{"text": "good", "label": 0.5}, {"text": "bad", "label": -2}],
        ),
        (
            RerankingTask(),
            (PoolerHead(), LabelHead(1)),
            [{"query": "good", "positive": "good", "negative": "bad"}],
        ),
        (QuestionAnsweringTask(), (SpanHead(),), [question]),
    ):
        model = saved(folder := tmp_path / task.name, *heads)
        ready = prepared(FinetuneConfig(FAST, task=task), folder, train=rows * 8)
        kind = heads[-1].kind
        assert equal(ready.task_model.model.heads[kind], model.heads[kind])
        assert ready.fresh == ()


def test_a_folder_of_others_is_read_at_full_length_with_its_own_names(tmp_path):
    saved(tmp_path / "model", PoolerHead(), LabelHead(2))
    task_model = open_task(str(tmp_path / "model")).task_model
    assert (task_model.labels, task_model.length) == (("LABEL_0", "LABEL_1"), 32)
    assert task_model.task.columns == TextColumns()
    (tmp_path / "model" / "bothways.json").write_text('{"length": "long"}')
    with pytest.raises(ConfigError, match=r"^bothways\.json\.length: 'long' is given"):
        open_task(str(tmp_path / "model"))


def test_a_classifier_that_is_tuned_further_reads_as_much_of_a_text(tmp_path):
    rows = [{"text": "a good film", "label": "pos"}, {"text": "a bad play", "label": "neg"}]
    options: dict[str, Any] = {"epochs": 1, "device": "cpu"}
    start = make_folder(tmp_path / "bert", max_position_embeddings=200)
    first = bothways.finetune(start, rows, None, "classify", length=160, **options)
    first.save(tmp_path / "first")
    for task, length in (("classify", 160), ("multilabel", 128)):
        tuned = bothways.finetune(tmp_path / "first", rows, None, task, **options)
        assert tuned.task_model.length == length, task
    record = tmp_path / "first" / "bothways.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"length": "long"}))
    with pytest.raises(ConfigError) as raised:
        bothways.finetune(tmp_path / "first", rows, None, "classify", fresh="head", **options)
    assert raised.value.where == "bothways.json.length"


def test_two_ranks_do_what_one_does(files, tmp_path):
    """At a store that outlives a run, as torchrun's: the ranks have to find each other anew in the second."""
    model = str(make_folder(tmp_path / "bert", dropout=0.0))
    training = replace(FAST, until=Steps(4), evaluate=Steps(2))
    settings = replace(files, model=model, training=training)
    alone = finetune(settings, tmp_path / "alone", device="cpu")
    (tmp_path / "run.toml").write_text(configs.to_toml(settings))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    folders = [tmp_path / "two", tmp_path / "again"]
    on_ranks(2, fit_on_rank, tmp_path / "run.toml", folders, port=store.port)
    shared = load_model(tmp_path / "two" / "model").model.state_dict()
    for name, tensor in alone.task_model.model.state_dict().items():
        # A key's gradient is rounding, and Adam makes it as large as the rate.
        if not name.endswith("qkv.bias"):
            assert torch.allclose(tensor, shared[name], atol=5e-5), name


def scores(count: int, seed: int) -> list[dict[str, Any]]:
    """Scores far from 0, which the head learns in their own units."""
    rows = make_rows(count, seed)
    return [{"text": row["text"], "score": 10_000 + 3000 * (row["label"] == "pos")} for row in rows]


def pairs(count: int, seed: int) -> list[dict[str, Any]]:
    texts = [row["text"] for row in make_rows(count, seed)]
    return [{"anchor": one, "positive": other} for one, other in itertools.pairwise(texts)]


EVERYTHING = {"layer_decay": 0.9, "reinitialise": 1, "frozen": 1, "pull": 1.0}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "low-rank": (make_rows, {"lora": {"rank": 2, "alpha": 4.0}}),
    "stability": (make_rows, {"stability": EVERYTHING, "seed": 4, "order_seed": 7}),
    "patience": (make_rows, {"early_stopping": 1, "evaluate": "2 steps"}),
    "scores": (scores, {"task": "regress"}),
    "few-shot": (make_rows, {"recipe": "few-shot", "few_shot": {"pairs": 4}}),
    "vectors": (pairs, {"task": "embed"}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_equals_one_without_a_break(case, folder, tmp_path):
    make, settings = CASES[case]

    def run(name: str, **more: Any) -> Any:
        return bothways.finetune(
            folder, make(64, 0), make(20, 1), out=tmp_path / name, until="8 steps", lr=3e-3,
            length=16, device="cpu", progress=False, training={"save": "3 steps"},
            **settings, **more,
        )  # fmt: skip

    whole = run("whole")
    with pytest.raises(KeyboardInterrupt, match="Saved after step 2"):
        run("run", on_event=signal_at(2, signal.SIGTERM))
    assert not (tmp_path / "run/model").exists()
    again = run("run", resume=True)
    assert again.metrics == whole.metrics
    ends = [(done.progress.steps, done.progress.early) for done in (again, whole)]
    assert ends[0] == ends[1]
    assert equal(again.task_model, whole.task_model)
    files = [Path(tmp_path, name, "model/model.safetensors") for name in ("run", "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()
    if case == "stability":
        card = (tmp_path / "whole/model/README.md").read_text()
        assert "| pull | 1.0 |" in card
        assert "| seed of the order | 7 |" in card
