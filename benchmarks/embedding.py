"""Speed of sentence vectors on a CPU: this library and the common alternatives, in one run.

    python benchmarks/embedding.py [--texts 1200] [--rounds 3] [--threads 1] [--latency 10]
                                   [--starts 3] [--model FOLDER] [--only NAME …]

The texts are docstrings of the installed standard library: about 27 tokens in the median, at most
256. All contenders turn texts into vectors, including tokenization, in fp32 and with equal threads;
where the processor has bf16 instructions, sentence-transformers, openvino and this library run in
bf16, too. Vectors in fp32 must agree with transformers' within 1e-4; the differences of the others
are printed.

    transformers            batches of 32 in the order of the texts, padded to the longest
    sentence-transformers   encode with its defaults: batches of 32, sorted by characters
    onnxruntime, openvino   the exported model, all optimizations, batches of 32 sorted by tokens
    onnxruntime int8        the same after quantize_dynamic: weights per channel
    bothways                predict, as the command line does
    bothways prepared       the same with prepared weights, as a `Predictor` holds them

A peer that is not installed is named and left out:
pip install onnxruntime openvino onnx onnxscript sentence-transformers.

Then one short text at a time, ten times in a row after a warm-up, and a fresh process from its
start to its first vector.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import numpy as np
import torch
from harness import Rounds, against, best, interleaved, machine, minilm, show, span
from numpy.typing import NDArray

from bothways.core.runtime.devices import has_bf16, has_int8
from bothways.core.runtime.process import tune_allocator
from bothways.lab import quickstart
from bothways.prediction.engine import predict, prepare_task_model
from bothways.prediction.opening import open_task_model
from bothways.prediction.session_model import openvino_core
from bothways.tasks.base import TaskModel
from bothways.tasks.text_task import TextExample
from bothways.training.step_cost import forward_flops

LONGEST, BATCH, AGAIN = 256, 32, 10
CPU = torch.device("cpu")
Vectors = NDArray[np.float32]
Embed = Callable[[list[str]], Vectors]


def docstrings(count: int) -> list[str]:
    """Return `count` docstrings of the standard library, drawn evenly, in their order there."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    every = list(dict.fromkeys(text for file in files for text in quickstart.docstrings(file)))
    chosen = np.random.default_rng(0).choice(len(every), min(count, len(every)), replace=False)
    return [every[place] for place in sorted(chosen)]


def ours(task: TaskModel[Any, Any]) -> Embed:
    """Return the embedding function of this library, with the command line's memory settings."""
    tune_allocator()

    def embed(texts: list[str]) -> Vectors:
        found = predict(task, map(TextExample, texts))
        return np.concatenate([prediction.vectors for _, prediction in found])

    return embed


def pooled(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean over real tokens, normalized to length 1, as the model was trained."""
    weights = mask[:, :, None].to(tokens.dtype)
    return torch.nn.functional.normalize((tokens * weights).sum(1) / weights.sum(1), dim=-1)


def with_transformers(folder: str, _: int) -> Embed:
    """Return the embedding function that a user of transformers writes."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModel.from_pretrained(folder).eval(),
    )

    @torch.inference_mode()
    def embed(texts: list[str]) -> Vectors:
        parts = []
        for start in range(0, len(texts), BATCH):
            batch = texts[start : start + BATCH]
            inputs = tokenizer(
                batch, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt"
            )
            parts.append(
                pooled(model(**inputs).last_hidden_state, inputs["attention_mask"]).numpy()
            )
        return np.concatenate(parts)

    return embed


def with_sentence_transformers(folder: str, _: int, dtype: torch.dtype = torch.float32) -> Embed:
    """Return `SentenceTransformer.encode` with its defaults."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": dtype})
    model.max_seq_length = LONGEST
    return functools.partial(model.encode, show_progress_bar=False)


def with_onnxruntime(folder: str, threads: int) -> Embed:
    """Return the exported model in onnxruntime."""
    return with_session(exported(folder), folder, threads)


def with_onnxruntime_int8(folder: str, threads: int) -> Embed:
    """Return the exported model in int8, quantized dynamically, without data."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    source = Path(exported(folder))
    file = source.with_suffix(".int8.onnx")
    if not file.exists():
        quantize_dynamic(source, file, per_channel=True, weight_type=QuantType.QInt8)
    return with_session(str(file), folder, threads)


def with_session(file: str, folder: str, threads: int) -> Embed:
    """Open a model in a session of onnxruntime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return sorted_batches(folder, lambda inputs: session.run(None, inputs)[0])


def with_openvino(folder: str, threads: int, precision: str = "f32") -> Embed:
    """Return the exported model in openvino, compiled for one precision."""
    core = openvino_core()
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": precision,
        "PERFORMANCE_HINT": "LATENCY",
    }
    model = core.compile_model(core.read_model(exported(folder)), "CPU", settings)
    return sorted_batches(folder, lambda inputs: model(inputs)[0])


@functools.lru_cache
def exported(folder: str) -> str:
    """Export the model to ONNX with free batch size and length; return the cached file."""
    import transformers

    key = f"{Path(folder).resolve()} {torch.__version__} {transformers.__version__}"
    file = (
        Path(tempfile.gettempdir())
        / f"embedding-{hashlib.sha256(key.encode()).hexdigest()[:16]}.onnx"
    )
    if file.exists():
        return str(file)
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    names = ("input_ids", "attention_mask", "token_type_ids")
    inputs = {name: torch.ones(2, 8, dtype=torch.int64) for name in names}
    free = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=LONGEST)}
    torch.onnx.export(
        model, (), file, kwargs=inputs, input_names=list(names), output_names=["tokens", "pooler"],
        dynamic_shapes=dict.fromkeys(names, free), dynamo=True, verbose=False,
    )  # fmt: skip
    return str(file)


def sorted_batches(
    folder: str, run: Callable[[dict[str, NDArray[np.int64]]], NDArray[np.float32]]
) -> Embed:
    """Run texts through a model with padded rows, sorted by their number of tokens."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(LONGEST)

    def embed(texts: list[str]) -> Vectors:
        rows = tokenizer.encode_batch_fast(texts)
        order = sorted(range(len(rows)), key=lambda place: -len(rows[place].ids))
        result = list[Any](rows)
        for start in range(0, len(rows), BATCH):
            places = order[start : start + BATCH]
            longest = len(rows[places[0]].ids)
            for place in places:
                rows[place].pad(longest)
            ids, mask = (
                np.array([getattr(rows[place], name) for place in places], dtype=np.int64)
                for name in ("ids", "attention_mask")
            )
            tokens = run(
                {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
            )
            vectors = pooled(torch.from_numpy(tokens), torch.from_numpy(mask)).numpy()
            for place, vector in zip(places, vectors, strict=True):
                result[place] = vector
        return np.stack(result)

    return embed


PEERS: Mapping[str, Callable[[str, int], Embed]] = {
    "transformers": with_transformers,
    "sentence-transformers": with_sentence_transformers,
    "onnxruntime": with_onnxruntime,
    "onnxruntime int8": with_onnxruntime_int8,
    "openvino": with_openvino,
}
IN_BF16: Mapping[str, Callable[[str, int], Embed]] = {
    "sentence-transformers bf16": functools.partial(
        with_sentence_transformers, dtype=torch.bfloat16
    ),
    "openvino bf16": functools.partial(with_openvino, precision="bf16"),
}
STARTS = {
    "sentence-transformers": """
import sys
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], device="cpu")
model.encode(["A short text."], show_progress_bar=False)
""",
    "bothways": """
import sys
import bothways
bothways.load(sys.argv[1], "embed", device="cpu").encode("A short text.")
""",
}


def assembled(
    folder: str, task: TaskModel[Any, Any], threads: int, only: list[str]
) -> dict[str, Embed]:
    """Return the contenders of this machine, or those in `only`, and transformers."""
    found: dict[str, Embed] = {}
    for name, make in (PEERS | IN_BF16 if has_bf16(CPU) else PEERS).items():
        if only and name not in (*only, "transformers"):
            continue
        try:
            found[name] = make(folder, threads)
        except ImportError as error:
            print(f"{name} is left out: {error}")
    found |= {"bothways": ours(task), "bothways prepared": ours(prepare_task_model(task))}
    if has_bf16(CPU):
        found["bothways prepared bf16"] = ours(prepare_task_model(task, "bf16"))
    return found | (
        {"bothways int8": ours(prepare_task_model(task, "int8"))} if has_int8(CPU) else {}
    )


def agreement(contenders: Mapping[str, Embed], texts: list[str]) -> None:
    """Print how far the vectors of each differ from transformers'; exit if it is too far."""
    expected = contenders["transformers"](texts)
    for name, embed in contenders.items():
        found = embed(texts)
        cosine = (
            (found * expected).sum(1)
            / np.linalg.norm(found, axis=1)
            / np.linalg.norm(expected, axis=1)
        )
        difference = np.abs(found - expected).max()
        print(f"{name:28}largest difference {difference:.1e}, smallest cosine {cosine.min():.7f}")
        if difference > 1e-4 and not name.endswith(("bf16", "int8")):
            sys.exit(f"{name} gives other vectors than transformers")


def report(
    title: str,
    taken: Mapping[str, Rounds],
    threads: int,
    unit: float,
    rate: Callable[[float], list[str]],
) -> None:
    """Print a table relative to the fastest peer; seconds are multiplied by `unit`."""
    peers = [name for name in taken if not name.startswith("bothways") and "int8" not in name]
    if not peers:
        return
    peer = best(taken, peers, threads)
    lines = against(taken, peer, threads)
    kinds = ["processor", "clock"] if threads == 1 else ["clock"]
    times = [
        [f"{second * unit:.2f}" for second in (x.seconds, x.clock)[-len(kinds) :]] for x in lines
    ]
    rows = [
        [x.name, *time, span(x.speed), *rate(x.seconds)]
        for x, time in zip(lines, times, strict=True)
    ]
    scale = "s" if unit == 1 else "ms"
    extra = ["tokens/s", "of GEMM"] if rate(1.0) else []
    show(title, [*(f"{scale} ({kind})" for kind in kinds), f"× {peer}", *extra], rows)


def product_rate(threads: int) -> float:
    """Return operations per second of a matrix product of 1,024 × 1,024."""
    left, right = torch.randn(2, 1024, 1024)
    taken = interleaved({"product": lambda: left @ right}, rounds=10)["product"]
    return 2 * 1024**3 / min(taken.seconds(threads))


def again(embed: Embed, texts: list[str]) -> None:
    """Call `AGAIN` times in a row: at first, threads of the previous contender still spin."""
    for _ in range(AGAIN):
        embed(texts)


def start(code: str, folder: str) -> None:
    """Run code in a fresh process."""
    subprocess.run([sys.executable, "-c", code, folder], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--model", default=minilm())
    for name, value in {
        "texts": 1200,
        "rounds": 3,
        "threads": 1,
        "latency": 10,
        "starts": 3,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    folder, threads = str(options.model), options.threads
    torch.set_num_threads(threads)
    task, texts = (
        open_task_model(folder, "embed", length=LONGEST, device="cpu"),
        docstrings(options.texts),
    )
    lengths = [
        len(sequence)
        for item in task.encode([*map(TextExample, texts)])
        for sequence in item.sequences
    ]
    print(
        f"{len(texts):,} texts, {sum(lengths):,} tokens, median {statistics.median(lengths):.0f}, at most {max(lengths)}"
    )
    contenders = assembled(folder, task, threads, options.only)
    agreement(contenders, texts[:: max(1, len(texts) // 100)])
    contenders = {
        name: embed
        for name, embed in contenders.items()
        if name in options.only or not options.only
    }
    flops, tokens = sum(n * forward_flops(task.model.config, (), n) for n in lengths), sum(lengths)
    if options.rounds:
        works = {name: functools.partial(embed, texts) for name, embed in contenders.items()}
        gemm = product_rate(threads)
        rate = lambda seconds: [f"{tokens / seconds:,.0f}", f"{flops / seconds / gemm:.0%}"]  # noqa: E731
        report("All texts", interleaved(works, options.rounds, warm=0), threads, 1, rate)
    if options.latency:
        short = [next(text for text, n in zip(texts, lengths, strict=True) if 12 <= n <= 20)]
        works = {name: functools.partial(again, embed, short) for name, embed in contenders.items()}
        report(
            "One short text",
            interleaved(works, options.latency),
            threads,
            1e3 / AGAIN,
            lambda _: [],
        )
    if options.starts:
        works = {
            name: functools.partial(start, code, folder)
            for name, code in STARTS.items()
            if name in contenders
        }
        report(
            "From the start to a first vector",
            interleaved(works, options.starts),
            1,
            1,
            lambda _: [],
        )
    packages = (
        "torch",
        "transformers",
        "sentence-transformers",
        "onnxruntime",
        "openvino",
        "tokenizers",
        "numpy",
    )
    print(f"{threads} thread{'s' * (threads > 1)}; {machine(packages)}")


if __name__ == "__main__":
    main()
