"""The figures of one GPU, each next to its peer, in one run.

    python benchmarks/gpu.py [steps steps-modern vectors finetuning loader] [--out gpu.jsonl]
                             [--device cpu --small]

No data are read: texts are docstrings of the installed standard library, models have random weights
and the shape of BERT-base. How long a step takes depends on shapes and lengths alone. Everything
computes in bf16 with dropout, where the models have it. A contender has the card for itself, in a
process of its own, one after the other; each prints a line and appends a record to the file.
With `--device cpu --small` it shows whether all of it runs; on a card it has not run yet.

    steps         an update of BERT: forward, losses, backward, clipping, AdamW. Median of the
                  second half of the updates; the share of what a product of 8192³ reaches
    steps-modern  the same of ModernBERT-base with 30 % masks, 64 sequences of 1,024 tokens
    vectors       tokens a second of mixed lengths, and milliseconds for one text, against
                  sentence-transformers with its defaults
    finetuning    tokens a second of mixed lengths, 32 examples per step, against the Trainer with
                  its padding to the longest of a batch (needs accelerate)
    loader        tokens a second that the processes of the data prepare, without a model
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from embedding import docstrings
from peers.peer import Plan as Settings

import bothways
from bothways.core.batch import Batch, pack
from bothways.core.runtime.devices import gemm_rate, wait
from bothways.core.source import Cursor, Sequence, TrainingStep
from bothways.data.corpus_source import Corpora
from bothways.data.loader import TokenBudget, ahead
from bothways.data.masking import Masking, Vocabulary
from bothways.lab.bench import race
from bothways.model.families import modernbert
from bothways.model.model import Model
from bothways.objectives.masked_lm import MaskedLM, MaskedLMModule, MaskedLMNextSentence
from bothways.pretraining.build import loader_of
from bothways.pretraining.config import PretrainConfig
from bothways.pretraining.run import training_documents
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.text_task import TextExample
from bothways.text.tokenizer import Tokenizer
from bothways.training.loop import Loop
from bothways.training.optimizers import AdamW, build_optimizer
from bothways.training.parallel import Plan
from bothways.training.run import compute_as
from bothways.training.saved_state import RunTensors
from bothways.training.schedules import RunState, Steps
from finetuning import Data, label, ours, theirs

Record = dict[str, Any]
SHAPES = [("long", 64, 512), ("long", 256, 128), ("large", 32, 512), ("base", 16, 128)]
WAYS = (
    "transformers compiled",
    "bothways",
    "bothways compiled",
    "bothways graphs",
    "bothways compiled graphs",
)
UPDATES = 60


def step_of_bert(shape: str, rows: int, length: int, way: str, device: torch.device) -> Record:
    """Time updates of BERT with both of its losses."""
    work = dataclasses.replace(race.WORKLOADS[shape], rows=rows, length=length)
    batch = race.make_batch(work)
    if way.startswith("transformers"):
        update = race.build_transformers_update(work, batch, "bf16", device, "compiled" in way)
        seconds = timed(update, device)
    else:
        model = Model(*MaskedLMNextSentence().models(work.encoder)["model"])
        seconds = timed_loop(MaskedLMModule(model), batch, way, device)
    return figures(work, seconds, device)


def step_of_modernbert(rows: int, length: int, way: str, device: torch.device) -> Record:
    """Time updates of ModernBERT-base with 30 % of the tokens masked."""
    work = race.Workload("ModernBERT-base", modernbert.base(), rows, length)
    batch = masked_batch(work)
    model = Model(*MaskedLM().models(work.encoder)["model"])
    record = figures(work, timed_loop(MaskedLMModule(model), batch, way, device), device)
    del record["of GEMM"]  # a workload's operations are those of 15 % masks
    return record


def masked_batch(work: race.Workload) -> Batch:
    """Return random tokens in full sequences, 30 % of them masked."""
    rng = np.random.default_rng(0)
    special = np.zeros(work.encoder.vocab, dtype=bool)
    special[:5] = True
    vocabulary = Vocabulary(special, np.zeros_like(special), 4)
    objective = MaskedLM(masking=Masking(0.3))
    ids = rng.integers(5, work.encoder.vocab, (work.rows, work.length), dtype=np.int32)
    segments = np.zeros(work.length, np.int8)
    sequences = [Sequence(row, segments, {}) for row in ids]
    return pack([objective.prepare(sequence, vocabulary, rng) for sequence in sequences])


def timed(update: Callable[[], None], device: torch.device) -> list[float]:
    """Return the seconds of updates, those of the first half left out: they compile and warm up."""
    marks = list[float]()
    for _ in range(UPDATES):
        update()
        wait(device)
        marks.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(marks[UPDATES // 2 - 1 :])]


def timed_loop(
    training_module: MaskedLMModule, batch: Batch, way: str, device: torch.device
) -> list[float]:
    """Return the seconds of updates in one run of the training loop, as `timed`."""
    marks = list[float]()

    def mark(*_: object) -> bool:
        wait(device)
        marks.append(time.perf_counter())
        return False

    training_module.to(device)
    training = dataclasses.replace(race.DEFAULT_TRAINING, compiled="compiled" in way)
    compute_as(training_module.model.encoder, training, device)
    batch = batch if device.type == "cpu" else batch.pinned()
    optimizer = build_optimizer(AdamW(), training_module.named_parameters())
    tensors = RunTensors(training_module, optimizer, Plan())
    loop = Loop(tensors, lambda _: 1.0, on_step=mark, precision="bf16", graphs="graphs" in way)
    step = TrainingStep((batch,), Cursor(), batch.layout.tokens, batch.layout.sequences, 0.0)
    loop.train(itertools.repeat(step, UPDATES), Steps(UPDATES), RunState())
    return [after - before for before, after in itertools.pairwise(marks[UPDATES // 2 - 1 :])]


def figures(work: race.Workload, seconds: list[float], device: torch.device) -> Record:
    """Return what is printed of updates."""
    step, peak = statistics.median(seconds), gemm_rate(device, torch.bfloat16)
    return {
        "ms": round(1e3 * step, 2),
        "tokens/s": round(work.tokens / step),
        "of GEMM": round(work.operations / step / peak, 3),
        "GiB": round((race.high_water_mark(device) or 0) / 2**30, 2),
    }


def random_model(folder: Path, texts: list[str], small: bool) -> str:
    """Write a sentence encoder of random weights with a vocabulary of the texts; return its folder."""
    encoder = bothways.preset("bert-mini" if small else "bert-base")
    tokenizer = bothways.train_tokenizer(texts, 30_000, progress=False)
    encoder = dataclasses.replace(encoder, vocab=tokenizer.size)
    torch.manual_seed(0)
    model = Model(*MaskedLMNextSentence().models(encoder)["model"])
    bothways.save_model(folder, model, tokenizer)
    return str(folder)


def vectors(way: str, every: list[str], small: bool, device: torch.device) -> Record:
    """Time the vectors of texts, longest 512 tokens, and of one short text at a time."""
    with tempfile.TemporaryDirectory() as folder:
        name = random_model(Path(folder) / "model", every, small)
        tokenizer = Tokenizer.load(Path(name))
        tokens = sum(min(512, len(ids) + 2) for ids in map(tokenizer.encode, every))
        if way == "sentence-transformers":
            from sentence_transformers import SentenceTransformer

            kwargs = {"dtype": torch.bfloat16}
            embed = partial(
                SentenceTransformer(name, device=str(device), model_kwargs=kwargs).encode,
                show_progress_bar=False,
            )
        else:
            embed = bothways.load(name, "embed", device=str(device), precision="bf16").encode
        rounds = [taken(lambda: embed(every), device) for _ in range(4)][1:]
        ones = [
            taken(lambda: embed("A short text of some ten words, as a query."), device)
            for _ in range(60)
        ][20:]
    return {
        "tokens/s": round(tokens / statistics.median(rounds)),
        "one text, ms": round(1e3 * statistics.median(ones), 2),
    }


def taken(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that work takes on the device."""
    wait(device)
    start = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - start


def finetuning(way: str, every: list[str], small: bool, device: torch.device) -> Record:
    """Time an epoch of the classification of texts of mixed lengths, at most 256 tokens."""
    with tempfile.TemporaryDirectory() as folder:
        name = random_model(Path(folder) / "model", every, small)
        examples = [TextExample(text, label=str(len(text) % 2)) for text in every]
        job = Data("", "", ClassificationTask(), "accuracy")
        data = label(job.task, Tokenizer.load(Path(name)), examples, examples[:32], 256)
        settings = Settings(Path(name), 256, 1.0, 0, precision="bf16", device=str(device))
        side = ours if way == "bothways" else theirs
        side(job, data, settings)  # the first run compiles and warms up
        done = side(job, data, settings)
    return {"tokens/s": round(done.tokens / done.seconds)}


def loader(length: int, every: list[str], seconds: float, device: torch.device) -> Record:
    """Count the tokens that are read ahead of a device in full sentences and pairs."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "texts.jsonl"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in every), "utf8")
        tokenizer = bothways.train_tokenizer(file, 30_000, progress=False)
        corpus = bothways.build_corpus(file, tokenizer, Path(folder) / "corpus", progress=False)
        encoder = dataclasses.replace(bothways.preset("bert-base"), vocab=tokenizer.size)
        objective = MaskedLM() if length > 128 else MaskedLMNextSentence()
        settings = PretrainConfig(
            encoder,
            race.DEFAULT_TRAINING,
            objective,
            microbatch_tokens=32_768,
            batch=TokenBudget(65_536),
        )
        settings = dataclasses.replace(
            settings, phases=(dataclasses.replace(settings.phases[0], length=length),)
        )
        corpora = Corpora.of(corpus, None)
        source = loader_of(settings, corpora, training_documents(settings, corpora), Plan())
        read, begin = 0, time.perf_counter()
        for step in ahead(source, device, Cursor()):
            read += step.tokens
            if time.perf_counter() - begin > seconds:
                break
        return {"tokens/s": round(read / (time.perf_counter() - begin))}


def contenders(
    small: bool, device: torch.device
) -> Iterator[tuple[str, str, Callable[[torch.device], Record]]]:
    """Yield a kind, a name and what measures it."""
    ways = [way for way in WAYS if device.type != "cpu" or way == "bothways"]
    for shape, rows, length in [("small", 4, 64)] if small else SHAPES:
        for way in ways:
            # Large steps keep the card busy without graphs.
            if "graphs" not in way or rows * length < 16_384:
                measure = partial(step_of_bert, shape, rows, length, way)
                yield "steps", f"{shape} {rows} × {length}, {way}", measure
    rows, length = (1, 128) if small else (64, 1024)
    for way in ways:
        if not way.startswith("transformers") and "graphs" not in way:
            measure = partial(step_of_modernbert, rows, length, way)
            yield "steps-modern", f"{rows} × {length}, {way}", measure
    every = docstrings(100_000)
    texts = every[:: len(every) // (64 if small else 8192)]
    for way in ("sentence-transformers", "bothways"):
        yield "vectors", way, partial(vectors, way, texts, small)
    for way in ("Trainer", "bothways"):
        yield "finetuning", way, partial(finetuning, way, texts, small)
    for length in (128, 512):
        measure = partial(loader, length, every, 1.0 if small else 10.0)
        yield "loader", f"sequences of {length}", measure


KINDS = ("steps", "steps-modern", "vectors", "finetuning", "loader")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--out", type=Path, default=Path("gpu.jsonl"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="small models: does it run at all?")
    options = parser.parse_args()
    if unknown := set(options.kinds) - set(KINDS):
        parser.error(f"unknown kinds {', '.join(unknown)}: they are {', '.join(KINDS)}")
    device = torch.device(options.device)
    print(race.hardware(device), flush=True)
    for kind, name, measure in contenders(options.small, device):
        if options.kinds and kind not in options.kinds:
            continue
        begin = time.perf_counter()
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            try:
                record = pool.submit(measure, device).result()
            except Exception as error:  # the other figures are worth having
                traceback.print_exception(error)
                record = {"error": f"{type(error).__name__}: {error}"}
        record = {
            "kind": kind,
            "name": name,
            **record,
            "seconds": round(time.perf_counter() - begin),
        }
        print(", ".join(f"{key} {value}" for key, value in record.items()), flush=True)
        with options.out.open("a", encoding="utf8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
