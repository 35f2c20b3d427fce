"""Small labelled data for every task, written by grammars: enough to try each command in a minute.

A template is a sentence with symbols such as "{film}", which `Grammar.say` replaces by one of the
symbol's alternatives. What is equal in every language and task is in `demo`; the rest are words.
The labels follow from the sentences, some of them only from the order of the words ("The plot is
dull, but the film is moving."). The raw text is about the same people, animals, films and bank, so
that a model that is pre-trained on it in minutes knows the words. Equal bytes on every machine.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bothways.core.config.values import checked
from bothways.core.errors import ResourceError
from bothways.core.files import local_path, replace_folder

Words = Mapping[str, str]
"""Alternatives by symbol, separated by "|"."""

PEOPLE: Words = {
    "first": "Anna|Ben|Clara|David|Elif|Farid|Greta|Hugo|Ines|Jonas|Kira|Leo|Mira|Noah|Olga|Paul",
    "last": "Keller|Moreau|Lindgren|Okafor|Tanaka|Rossi|Novak|Haddad|Silva|Brandt|Sato|Eriksen",
    "town": "Oslo|Lisbon|Vienna|Cairo|Lima|Kyoto|Dublin|Nairobi|Quebec|New Delhi|Cape Town",
    "firm": "Northlight Bank|Tidal Institute|Greenfield University|Copper Press|Harbour Museum"
    "|Alder Clinic|Bluebird Airlines",
    "job": "doctor|teacher|painter|pilot|baker|lawyer|gardener|nurse",
    "year": "1961|1968|1974|1979|1983|1987|1990|1994",
    "later": "2004|2008|2011|2015|2019|2022",
    "person": "{first} {last}",
    "news": "{person} lives in {town} .|{person} works for {firm} .|The train to {town} was late ."
    "|{firm} opens an office in {town} .|Last year {person} moved from {town} to {town} ."
    "|{person} and {person} met in {town} .|{firm} has named {person} as its new director ."
    "|Nobody at {firm} wanted to talk .|It rained all day , and {person} stayed at home .",
}
TAGS = {"person": "PER", "town": "LOC", "firm": "ORG"}
BIOGRAPHY = (
    ("{name} was born in {town} in {year}.", "Where was {name} born?", "town"),
    ("{name} is a {job}.", "What is the job of {name}?", "job"),
    ("{name} has worked for {firm} since {later}.", "Who does {name} work for?", "firm"),
    ("{name} speaks two languages.", "Which prize did {name} win?", ""),
)
FILMS: Words = {
    "film": "film|movie|story|comedy|thriller|drama|sequel|documentary",
    "part": "acting|ending|script|music|plot|dialogue|camera work|cast",
    "good": "wonderful|moving|clever|funny|charming|gripping|beautiful|brilliant",
    "bad": "dull|clumsy|predictable|boring|noisy|shallow|tiresome|awful",
    "time": "last night|on Sunday|with my sister|on a long flight|at a festival|twice",
    "positive": "A {good} {film} whose {part} is {good}.|What a {good} {film}!"
    "|The {part} is {good}, and the rest is even better."
    "|The {part} is {bad}, but the {film} is {good}.|I saw it {time} and loved the {good} {part}."
    "|Not a single {bad} moment: the {part} is {good}.|Go and see this {film}, it is {good}.",
    "negative": "A {bad} {film} whose {part} is {bad}.|What a {bad} {film}!"
    "|The {part} is {bad}, and the rest is even worse."
    "|The {part} is {good}, but the {film} is {bad}.|I saw it {time} and hated the {bad} {part}."
    "|Not a single {good} moment: the {part} is {bad}.|Do not waste a night on this {bad} {film}.",
}
BANK: Words = {
    "hello": "|||Hello. |Hi! |Good morning. ",
    "please": "|||| Please help.| Thank you.| It is urgent.",
    "when": "yesterday|this morning|on Monday|last week|two days ago",
    "where": "in a shop|on the website|at the station|abroad|in the app",
    "who": "my landlord|my sister|a shop|my employer|a friend",
    "land": "Norway|Japan|Brazil|Kenya|Canada|Italy",
    "sum": "5 euros|12 euros|40 euros|250 euros|1,000 euros",
    "detail": "address|phone number|password|email address|name",
    "cards": "My card was stolen {when}.|The machine kept my card {when}."
    "|My card does not work {where}.|When does my new card arrive? I ordered it {when}."
    "|I lost my card {when}.",
    "transfers": "My transfer to {who} has not arrived.|I sent {sum} to the wrong person {when}."
    "|Can I cancel the payment of {sum} to {who}?|How long does a transfer to {land} take?"
    "|I still wait for {sum} from {who}.",
    "login": "I cannot log in {where}.|How do I change my {detail}?|I forgot my {detail} {when}."
    "|The app asks for my {detail} again and again.|My account was locked {when}.",
    "fees": "Why was I charged {sum} {when}?|What do you charge for cash in {land}?"
    "|There is a fee of {sum} that nobody can explain.|Is it free to pay by card in {land}?"
    "|Since {when} I pay {sum} more a month than before.",
}
QUEUES = ("cards", "transfers", "login", "fees")
TOPICS: Words = {
    "sport": "The match ended two to one.|Our team won the cup.|She ran a marathon in the rain.",
    "food": "The soup was far too salty.|They bake fresh bread here.|We cooked rice with beans.",
    "travel": "The train crossed the border.|Our hotel was near the sea.|We missed the ferry.",
    "music": "The choir sang for an hour.|He plays the cello.|The concert was sold out.",
    "": "It was a Tuesday.|Nobody said a word.|The letter came late.",
}
ANIMALS = """otter|eats fish|lives in rivers|sleeps on its back|can swim under ice
owl|eats mice|lives in old barns|sleeps during the day|can hear a mouse under snow
bee|drinks nectar|lives in a hive|sleeps in flowers at times|can see ultraviolet light
camel|eats thorny plants|lives in deserts|sleeps on its knees|can go without water for days
penguin|eats krill|lives on southern coasts|sleeps standing|can dive for minutes
squirrel|eats nuts|lives in trees|sleeps in a nest of leaves|can remember its stores
bat|eats insects|lives in caves|sleeps upside down|can find its way by echoes
salmon|eats small fish|lives in the sea|sleeps near the bottom|can leap up waterfalls
koala|eats eucalyptus leaves|lives in Australia|sleeps most of the day|can climb smooth trunks
spider|eats flies|lives in its web|sleeps in a corner|can spin silk
hedgehog|eats beetles|lives under hedges|sleeps through the winter|can roll into a ball
dolphin|eats squid|lives in warm seas|sleeps with half of its brain|can call others by name"""
FACTS = {animal: facts for animal, *facts in (line.split("|") for line in ANIMALS.splitlines())}
QUESTIONS = ("What does the {} eat or drink?", "Where does the {} live?", "How does the {} sleep?",
             "What can the {} do?")  # fmt: skip
ERRANDS: Words = {
    "bakery": "buys two loaves of bread|asks for a birthday cake|smells the warm rolls",
    "library": "returns three novels|looks for a quiet desk|borrows an atlas",
    "station": "waits for the train|buys a ticket to the coast|looks at the departures",
    "doctor": "shows her sore throat|asks about the medicine|waits with other patients",
    "beach": "builds a castle of sand|swims in the waves|collects shells",
    "garden": "waters the tomatoes|pulls out the weeds|plants a pear tree",
    "bank": "withdraws some cash|opens an account|asks for a loan",
    "kitchen": "peels the potatoes|stirs the soup|washes the dishes",
}
SCENES: Words = {
    "who": "man|woman|boy|girl|dog|cat", "does": "sleeps|eats|waits|plays|sings",
    "where": "in the garden|on the stairs|at the station|near the river|under a tree",
}  # fmt: skip
CHINESE: Words = {
    "good": "房间很干净|床很舒服|窗外的景色很美|卫生间很新|隔音很好|空调很安静|房间很宽敞|被子很软",
    "nice": "服务很周到|早餐很好吃|前台很热情|位置非常方便|价格很实惠|停车很方便|入住很快|餐厅不错",
    "bad": "房间很脏|床太硬|窗外只有一堵墙|卫生间很旧|隔音不好|空调太吵|房间太小|被子有味道",
    "poor": "服务很差|早餐很难吃|前台很冷淡|位置太偏|价格太贵|停车很麻烦|入住等了很久|餐厅很一般",
    "who": "我|我们|我爸妈|同事",
    "好评": "{good}，{nice}。|虽然{bad}，但是{nice}，总体很满意。|{who}住了两晚，{nice}。"
    "|下次还会再来，{nice}，{good}。|推荐这家酒店：{good}，{nice}。",
    "差评": "{bad}，{poor}。|虽然{good}，但是{poor}，总体很失望。|{who}住了两晚，{poor}。"
    "|再也不会来了，{poor}，{bad}。|不推荐这家酒店：{bad}，{poor}。",
}


Row = dict[str, Any]


class Grammar:
    """Words and a random generator; each file has its own, and is equal on every machine."""

    def __init__(self, file: str, *words: Words) -> None:
        self.words = {symbol: choices for table in words for symbol, choices in table.items()}
        self.rng = random.Random(file)

    def choose(self, symbol: str) -> str:
        """Return one of the alternatives of a symbol."""
        return self.rng.choice(self.words[symbol].split("|"))

    def say(self, template: str) -> str:
        """Return a sentence of a template: "a {good} film" → "a moving film"."""
        while "{" in template:
            template = re.sub(r"\{([^{}]*)\}", lambda match: self.choose(match[1]), template)
        return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", template)

    def labelled(self, labels: Sequence[str], count: int, template: str = "{LABEL}") -> list[Row]:
        """Return rows with a text and a label, by turns; no text is repeated."""
        texts = dict[str, str]()
        for label in itertools.cycle(labels):
            texts.setdefault(self.say(template.replace("LABEL", label)), label)
            if len(texts) == count:
                break
        return [{"text": text, "label": label} for text, label in texts.items()]


def _tickets(file: str, count: int) -> list[Row]:
    grammar = Grammar(file, BANK)
    rows = grammar.labelled(QUEUES, count, "{hello}{LABEL}{please}")
    return [
        {"id": 1001 + number, "created": f"2026-{number // 100 + 1:02}-{number % 28 + 1:02}",
         "message": row["text"], "queue": row["label"]}
        for number, row in enumerate(rows)
    ]  # fmt: skip


def _tagged(count: int) -> list[str]:
    """Return sentences in CoNLL's form: a word and its tag per line; no sentence is repeated."""
    grammar, sentences = Grammar("conll", PEOPLE), dict[str, None]()
    while len(sentences) < count:
        lines = list[str]()
        for symbol in grammar.choose("news").split():
            kind, words = TAGS.get(symbol.strip("{}")), grammar.say(symbol).split()
            marks = ["B", *"I" * (len(words) - 1)]
            tags = [f"{mark}-{kind}" if kind else "O" for mark in marks]
            lines += map(" ".join, zip(words, tags, strict=True))
        sentences["\n".join(lines) + "\n\n"] = None
    return [*sentences]


def _people(file: str, count: int) -> Iterator[tuple[str, list[Row]]]:
    """Iterate over short biographies with questions; the last one has no answer in the text."""
    grammar = Grammar(file, PEOPLE)
    for number in range(count):
        facts = {symbol: grammar.choose(symbol) for symbol in PEOPLE}
        facts["name"] = grammar.say("{first} {last}")
        text = " ".join(sentence.format(**facts) for sentence, _, _ in BIOGRAPHY)
        questions = [(question, facts.get(symbol)) for _, question, symbol in BIOGRAPHY]
        yield text, [
            {"id": f"{file}-{number}-{index}", "question": question.format(**facts),
             "answers": [{"text": answer, "answer_start": text.index(answer)}] if answer else [],
             "is_impossible": not answer}
            for index, (question, answer) in enumerate(questions)
        ]  # fmt: skip


def _scores(file: str, count: int) -> list[Row]:
    """Return pairs of scenes, and how much of them is equal: from 0 to 5."""
    grammar, rows = Grammar(file, SCENES), list[Row]()
    while len(rows) < count:
        scene = {symbol: grammar.choose(symbol) for symbol in SCENES}
        shared = grammar.rng.randrange(4)
        other = {symbol: scene[symbol] if index < shared else grammar.choose(symbol)
                 for index, symbol in enumerate(SCENES)}  # fmt: skip
        equal = sum(scene[symbol] == other[symbol] for symbol in SCENES)
        first = "The {who} {does} {where}.".format(**scene)
        second = "{where}, a {who} {does}.".format(**other)
        rows.append({"sentence1": first, "sentence2": second[0].upper() + second[1:],
                     "score": (0, 1.5, 3.5, 5)[equal]})  # fmt: skip
    return rows


def _choices(file: str, count: int) -> list[Row]:
    grammar, rows = Grammar(file, PEOPLE, ERRANDS), list[Row]()
    for _ in range(count):
        goals = grammar.rng.sample(list(ERRANDS), 4)
        label = grammar.rng.randrange(4)
        context = grammar.say(f"{{first}} goes to the {goals[label]} and")
        endings = {f"ending{n}": f"{grammar.choose(goal)}." for n, goal in enumerate(goals)}
        rows.append({"context": context, **endings, "label": label})
    return rows


def _fact(animal: str, kind: int) -> str:
    return f"The {animal} {FACTS[animal][kind]}."


def _ranked(file: str, count: int) -> list[Row]:
    """Return questions with four facts; the first answers it before they are shuffled.

    The dev data ask one question about each animal, the training data the three others.
    """
    grammar, rows = Grammar(file), list[Row]()
    while len(rows) < count:
        animal, *wrong = grammar.rng.sample(list(FACTS), 3)
        kind, other = grammar.rng.sample(range(4), 2)
        if ((list(FACTS).index(animal) + kind) % 4 == 0) != (file == "dev"):
            continue
        answer = _fact(animal, kind)
        documents = [answer, _fact(animal, other), *(_fact(name, kind) for name in wrong)]
        grammar.rng.shuffle(documents)
        rows.append({"query": QUESTIONS[kind].format(animal), "documents": documents,
                     "labels": [int(document == answer) for document in documents]})  # fmt: skip
    return rows


def _articles(file: str, count: int) -> str:
    """Return raw text: documents about a person, film, animal or bank, an empty line between."""
    films, scenes, bank = Grammar(file, FILMS), Grammar(file, SCENES), Grammar(file, BANK)
    documents = list[str]()
    for number, (text, questions) in enumerate(_people(file, count)):
        animal = list(FACTS)[number % len(FACTS)]
        review = ("{positive}", "{negative}")[number % 2]
        documents += [
            f"{text} {questions[-1]['question']} None.",
            " ".join(films.say(review) for _ in range(5)),
            " ".join(_fact(animal, kind) for kind in scenes.rng.sample(range(4), 4)),
            " ".join(scenes.say("The {who} {does} {where}.") for _ in range(4)),
            " ".join(bank.say(f"{{{queue}}}") for queue in QUEUES),
        ]
    return "\n\n".join(documents) + "\n"


def _files() -> Iterator[tuple[str, str]]:
    """Iterate over the names and texts of all files."""
    facts = [_fact(animal, kind) for animal in FACTS for kind in range(4)]
    questions = [QUESTIONS[kind].format(animal) for animal in FACTS for kind in range(4)]
    reviews = Grammar("reviews", FILMS).labelled(("positive", "negative"), 640)
    hotels = Grammar("hotels", CHINESE).labelled(("好评", "差评"), 540)
    tickets = _tickets("tickets", 640)
    unlabelled = [{name: row[name] for name in row if name != "queue"} for row in tickets[600:]]
    # Long texts: the label is that of one sentence, the others are about other things.
    scenes, letters = Grammar("letters", SCENES), list[Row]()
    for ticket in _tickets("letters", 400):
        sentences = [scenes.say("The {who} {does} {where}.") for _ in range(30)]
        sentences.insert(scenes.rng.randrange(30), ticket["message"])
        letters.append({"text": " ".join(sentences), "label": ticket["queue"]})
    remarks, topics = Grammar("topics", TOPICS), list[Row]()
    for _ in range(400):
        labels = remarks.rng.sample([label for label in TOPICS if label], remarks.rng.randrange(3))
        text = " ".join(remarks.choose(label) for label in ["", *labels])
        topics.append({"text": text, "labels": sorted(labels)})
    tables: dict[str, list[Row]] = {
        "train.tsv": reviews[:400], "dev.tsv": reviews[400:500], "test.tsv": reviews[500:600],
        "new.txt": reviews[600:], "tickets.csv": tickets[:600], "new.csv": unlabelled,
        "few.tsv": reviews[:16], "letters.jsonl": letters, "sts.tsv": _scores("sts", 400),
        "topics.jsonl": topics, "choices.csv": _choices("choices", 400),
        "train.jsonl": _ranked("train", 300), "dev.jsonl": _ranked("dev", 60),
        "pairs.jsonl": [{"query": question, "positive": fact}
                        for question, fact in zip(questions, facts, strict=True)],
        "texts.jsonl": [{"id": f"doc-{n}", "text": fact} for n, fact in enumerate(facts)],
        "texts.txt": [{"text": fact} for fact in facts],
        "queries.txt": [{"text": question} for question in questions[::5]],
        "zh/train.tsv": hotels[:400], "zh/dev.tsv": hotels[400:500], "zh/new.txt": hotels[500:],
    }  # fmt: skip
    for name, rows in tables.items():
        if name.endswith(".jsonl"):
            yield name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        elif name.endswith(".txt"):  # the first column alone
            yield name, "".join(f"{next(iter(row.values()))}\n" for row in rows)
        else:
            table, delimiter = io.StringIO(), "," if name.endswith(".csv") else "\t"
            writer = csv.DictWriter(table, [*rows[0]], delimiter=delimiter, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
            yield name, table.getvalue()
    tagged = _tagged(600)
    splits = {"train": tagged[:400], "dev": tagged[400:500], "test": tagged[500:]}
    for name, sentences in splits.items():
        yield f"{name}.conll", "".join(sentences)
    for name, count in (("train", 120), ("dev", 30)):
        paragraphs = [{"context": text, "qas": qas} for text, qas in _people(name, count)]
        data = {"version": "v2.0", "data": [{"title": "People", "paragraphs": paragraphs}]}
        yield f"{name}-v2.0.json", json.dumps(data, indent=1) + "\n"
    for number in (1, 2, 3):
        yield f"text/{number}.txt", _articles(f"text-{number}", 100)
    chinese = Grammar("text-zh", CHINESE)
    yield "zh/text.txt", "\n\n".join(
        "\n".join(chinese.say(("{好评}", "{差评}")[n % 2]) for _ in range(5))
        for n in range(200)
    ) + "\n"  # fmt: skip


COMMANDS = (
    "tokenizer train text/*.txt --size 1000 --out tokenizer",
    "corpus build text/*.txt --tokenizer tokenizer --out corpus",
    'pretrain corpus --model bert-tiny --until "2 minutes" --out bert',
    "finetune bert train.tsv --dev dev.tsv --out films",
    "predict films new.txt",
    "finetune bert tickets.csv --text message --label queue --dev 20% --out tickets",
    "predict tickets new.csv --keep id --out queues.csv",
    "finetune bert train.conll --task tag --dev dev.conll --out ner",
    "finetune bert train-v2.0.json --task answer --dev dev-v2.0.json --out squad",
    "finetune bert sts.tsv --task regress --dev 20% --out sts",
    "finetune bert topics.jsonl --task multilabel --dev 20% --out topics",
    "finetune bert choices.csv --task choice --dev 20% --out choices",
    "finetune bert train.jsonl --task rerank --dev dev.jsonl --out rank",
    "finetune bert pairs.jsonl --task embed --dev 20% --out vectors",
    "index texts.jsonl --model vectors --out my-index",
    "search my-index queries.txt",
)
"""Commands that run in the folder, in this order."""


@checked
def demo(folder: str | Path) -> list[Path]:
    """Write small labelled data of every task, to try the commands with.

    Reviews of films (.tsv), tickets of a bank (.csv), names (.conll), questions on texts (SQuAD),
    pairs with scores, topics, choices, questions with documents, reviews of hotels in Chinese, and
    raw text of the same words. All of it is invented, and equal on every machine.

    Args:
        folder: where to write: a new or empty folder.

    Returns:
        The files.

    Raises:
        ResourceError: the folder holds files, or cannot be written.

    Examples:
        >>> [file.name for file in bothways.demo("demo-data")][:4]
        ['train.tsv', 'dev.tsv', 'test.tsv', 'new.txt']
    """
    target = local_path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ResourceError("exists and is not empty", where=target, fix="Name a new folder.")
    paths = list[Path]()
    with replace_folder(target) as hidden:
        for name, text in _files():
            (hidden / name).parent.mkdir(exist_ok=True)
            (hidden / name).write_text(text, "utf8", newline="\n")
            paths.append(target / name)
    return paths
