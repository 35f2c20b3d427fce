"""Training of vocabularies with the trainers of `tokenizers`: WordPiece, byte-level BPE, Unigram.

Schuster & Nakajima 2012 (WordPiece), Sennrich et al. 2016 (BPE; over bytes: Radford et al. 2019),
Kudo 2018 (Unigram).

Notable choices. The same text gives the same file. The trainers alone do not ensure that, because
they iterate over hash tables in an order that differs between runs. In WordPiece that order decides
which characters are kept and which ids their "##" forms get, and so how ties between merges are
broken; therefore the alphabet is counted here and passed in a fixed order. Each character has its
"##" form, so that no word over the alphabet is unknown. Byte-level BPE has a fixed alphabet and is
deterministic. In Unigram the order of summation changes the last digits of the scores, so they are
rounded and the pieces sorted.

Special tokens come first, with their family's names and ids: [PAD] is 0, then [UNK], [CLS], [SEP],
[MASK]; in byte-level BPE <s> is 0, then <pad>, </s>, <unk>, <mask>, with RoBERTa's template.

The training text is an even sample of a stream of texts, of at most a given number of characters.
The tenth gigabyte does not improve a vocabulary, but training needs memory for every distinct word.
Therefore texts are cut and joined into blocks of near-equal size, each block draws a number that
depends only on its position, and the blocks with the smallest numbers are kept: all blocks have the
same chance, one pass is enough, and the same texts give the same sample.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from bothways.core.config.values import require_at_least, require_range
from bothways.core.errors import ConfigError, DataError, TokenizerError, argument
from bothways.core.files import surrogate_in
from bothways.core.source import rng
from bothways.text.tokenizer import Tokenizer
from bothways.text.tokenizer_classes import NAMES, Backend, bert, find_specials, roberta
from bothways.text.tokenizer_files import bert_backend, dress, finish

SPECIALS = [names[0] for names in NAMES.values()]
"""BERT's special tokens, in its order."""
ROBERTA = [NAMES[use][1] for use in ("cls", "pad", "sep", "unknown", "mask")]
"""RoBERTa's special tokens, in its order, but for <mask>, which is RoBERTa's last token."""
CEILING = 200_000_000
"""The default limit of the training text, in characters."""

ALPHABET = 1000
"""The number of characters that WordPiece and Unigram keep, whatever the coverage."""

_BLOCK = 4096
# Decimals of Unigram's scores, natural logarithms. Between runs they differ by up to 4e-11.
_DECIMALS = 4
# The difference between the scores that tokenizers gives to characters that no word needs.
_CHARACTER_STEP = 1e-4


@dataclass(frozen=True)
class Sample:
    """A sample: `blocks` of neighbouring texts in order, `characters` of `total`."""

    blocks: tuple[tuple[str, ...], ...]
    characters: int
    total: int

    def read(self) -> Iterator[str]:
        """Yield the texts."""
        return (text for block in self.blocks for text in block)


def characters_of(ceiling: float) -> int:
    """Return the characters of a ceiling in millions.

    Raises:
        ConfigError: it is not finite.
    """
    if not math.isfinite(ceiling):
        fix = "Give a large number to read all of a text."
        message = f"must be a number of millions of characters, not {ceiling}"
        raise ConfigError(message, where="ceiling", fix=fix)
    return int(ceiling * 1e6)


def sample(texts: Iterable[str], ceiling: int, seed: int = 0) -> Sample:
    """Return all texts if they fit in `ceiling` characters, else blocks of a thousandth of it.

    Raises:
        ConfigError: a ceiling below 1, or one text instead of several.
    """
    if isinstance(texts, str):  # whose items would be read as texts of one character
        raise ConfigError("must be several texts, not one", where="texts", fix="Give a list.")
    if ceiling < 1:
        message = f"must be at least one character, is {ceiling}"
        raise ConfigError(message, where="ceiling", fix="Give a positive number.")
    # The heap's first block has the largest number, and is the next to be dropped
    heap: list[tuple[float, int, tuple[str, ...]]] = []
    size_kept = size_seen = 0
    for index, block in enumerate(_blocks(texts, min(ceiling, max(_BLOCK, ceiling // 1000)))):
        size = sum(map(len, block))
        size_seen, size_kept = size_seen + size, size_kept + size
        heapq.heappush(heap, (-rng(seed, "vocabulary sample", index=index).random(), index, block))
        while size_kept > ceiling:
            size_kept -= sum(map(len, heapq.heappop(heap)[2]))
    blocks = sorted((index, block) for _, index, block in heap)
    return Sample(tuple(block for _, block in blocks), size_kept, size_seen)


def sample_languages(
    texts: Mapping[str, Iterable[str]], alpha: float, ceiling: int, seed: int = 0
) -> Sample:
    """Return a sample of several languages, with shares of the characters by `smoothed_shares`.

    It is as large as the texts, or `ceiling`. Languages with more than their share are sampled
    evenly, languages with less are repeated. Memory holds the sample and one language of at most
    `ceiling`.

    Raises:
        ConfigError: a ceiling below 1.
        DataError: a language has no text.
    """
    samples: dict[str, Sample] = {}
    for name, language in texts.items():
        samples[name] = sample(language, ceiling, seed)
        for sampled, room in _quotas(samples, alpha, ceiling).items():
            language_sample = samples[sampled]
            if language_sample.characters > room:
                smaller = sample(language_sample.read(), room, seed)
                samples[sampled] = Sample(smaller.blocks, smaller.characters, language_sample.total)
    blocks = list[tuple[str, ...]]()
    for name, room in _quotas(samples, alpha, ceiling).items():
        # Again and again, until the language has about as many characters as its quota.
        filled = 0
        for block in itertools.cycle(samples[name].blocks):
            size = sum(map(len, block))
            if room - filled < size / 2:
                break
            blocks.append(block)
            filled += size
    size = sum(len(text) for block in blocks for text in block)
    total = sum(language_sample.total for language_sample in samples.values())
    return Sample(tuple(blocks), size, total)


def smoothed_shares(sizes: Mapping[str, int], alpha: float) -> dict[str, float]:
    """Return shares proportional to size^alpha, which add up to 1.

    Example: alpha=0.7 and the sizes 1000 and 1 → 0.992 and 0.008, or 126 : 1.

    Raises:
        ConfigError: `alpha` is not between 0 and 1.
        DataError: a size is 0.
    """
    fix = "0 gives equal shares, 1 shares by size; mBERT has 0.7, XLM-R 0.3."
    require_range("[0, 1]", alpha=alpha, fix=fix)
    for name, size in sizes.items():
        if size <= 0:
            raise DataError("has no text", where=name, fix="Leave it out, or add text.")
    total = sum(sizes.values())
    weights = {name: (size / total) ** alpha for name, size in sizes.items()}
    total_weight = math.fsum(weights.values())  # `sum` differs between Pythons
    return {name: weight / total_weight for name, weight in weights.items()}


def _quotas(samples: Mapping[str, Sample], alpha: float, ceiling: int) -> dict[str, int]:
    """Return the characters of each language in the sample, at least one."""
    sizes = {name: language_sample.total for name, language_sample in samples.items()}
    total = min(ceiling, sum(sizes.values()))
    return {n: max(1, round(q * total)) for n, q in smoothed_shares(sizes, alpha).items()}


def _blocks(texts: Iterable[str], size: int) -> Iterator[tuple[str, ...]]:
    """Yield blocks of at most `size` characters; cut longer texts."""
    block, filled = list[str](), 0
    for text in texts:
        for start in range(0, len(text), size):
            piece = text[start : start + size]
            if filled + len(piece) > size:
                yield tuple(block)
                block, filled = [], 0
            block.append(piece)
            filled += len(piece)
    if block:
        yield tuple(block)


@dataclass(frozen=True)
class WordPiece:
    """BERT's vocabulary.

    Attributes:
        size: tokens, the special ones included.
        min_frequency: how often a pair of pieces must occur to be joined.
        lowercase, strip_accents, cjk: see `tokenizer_classes.bert`.
        alphabet: the number of characters to keep, the most frequent ones; words with others are
            unknown. None for 1,000, or as many as `coverage` needs and `size` has room for.
        coverage: the share of the text's characters to keep, where `alphabet` is None.
    """

    size: int = 30_000
    min_frequency: int = 2
    lowercase: bool = True
    strip_accents: bool | None = None
    cjk: bool = True
    alphabet: int | None = None
    coverage: float = 0.9995

    def __post_init__(self) -> None:
        _check(self, "size", "min_frequency", "alphabet")


@dataclass(frozen=True)
class ByteBPE:
    """RoBERTa's and GPT-2's vocabulary, over bytes: nothing is unknown, case and white space stay.

    Attributes:
        size: tokens, the special ones included.
        min_frequency: how often a pair of pieces must occur to be joined.
        prefix_space: read the first word of a text as if after a space, like the others.
    """

    size: int = 50_000
    min_frequency: int = 2
    prefix_space: bool = True

    def __post_init__(self) -> None:
        _check(self, "size", "min_frequency")


@dataclass(frozen=True)
class Unigram:
    """ALBERT's and SentencePiece's vocabulary: the pieces that make the text most probable.

    Attributes:
        size: tokens, the special ones included; fewer if the text does not need as many.
        lowercase, strip_accents: None for `strip_accents` means as `lowercase`.
        longest: the longest piece, in characters.
        coverage: the share of the text's characters to keep, beyond the first 1,000, as far as
            `size` has room; others are unknown. SentencePiece's default.
    """

    size: int = 30_000
    lowercase: bool = True
    strip_accents: bool | None = None
    longest: int = 16
    coverage: float = 0.9995

    def __post_init__(self) -> None:
        _check(self, "size", "longest")


LARGEST = 10_000_000
"""Tokens of the largest vocabulary: the trainers reserve memory for all that are asked for."""

Kind = WordPiece | ByteBPE | Unigram
KINDS: Mapping[str, type[Kind]] = {"wordpiece": WordPiece, "bpe": ByteBPE, "unigram": Unigram}
"""The kinds of vocabularies by the names that users give."""
Reader = Callable[[Sample], Iterator[str]]


def _check(kind: Kind, *positive: str) -> None:
    location, coverage = type(kind).__name__, getattr(kind, "coverage", 1.0)
    require_at_least(1, location, **{name: getattr(kind, name) for name in positive})
    if kind.size > LARGEST:
        message = f"must be at most {LARGEST:,}, not {kind.size}"
        raise ConfigError(message, where=f"{location}.size", fix="BERT has 30,522.")
    require_range("[0, 1]", location, coverage=coverage, fix="0.9995 keeps all but rare ones.")


def train_vocabulary(
    texts: Iterable[str], kind: Kind, *, ceiling: int = CEILING, seed: int = 0
) -> Tokenizer:
    """Train a tokenizer on texts, read once, or on an even sample of `ceiling` characters.

    Memory holds the sample and the trainer's tables of its distinct words.

    Raises:
        TokenizerError: there is no text, or `size` cannot hold special tokens and alphabet.
        DataError: a text holds half of a surrogate pair.
    """
    return learn(sample(texts, ceiling, seed), kind)


def learn(texts: Sample, kind: Kind, read: Reader = Sample.read) -> Tokenizer:
    """Train a tokenizer on a sample; `read` iterates over it and can report progress."""
    try:
        match kind:
            case WordPiece():
                backend = _learn_word_piece(texts, kind, read)
            case ByteBPE():
                backend = _learn_byte_bpe(texts, kind, read)
            case Unigram():
                backend = _learn_unigram(texts, kind, read)
    except UnicodeEncodeError as error:
        fix = 'Fix the source, or drop them: text.encode("utf-8", "ignore").decode("utf-8")'
        raise DataError(f"a text holds {surrogate_in(str(error.object))}", fix=fix) from error
    specials = find_specials(backend, {}, "the learned vocabulary")
    if isinstance(kind, ByteBPE):
        dress(backend, roberta(kind.prefix_space), specials)
    return Tokenizer(finish(backend, specials), specials)


def _learn_word_piece(texts: Sample, kind: WordPiece, reader: Reader) -> Backend:
    pipeline = bert(kind.lowercase, kind.strip_accents, kind.cjk)
    backend = bert_backend({}, pipeline)
    counts = _normal_characters(texts, backend)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    if kind.alphabet is not None:
        letters = sorted(letter for letter, _ in ranked[: kind.alphabet])
    else:
        # coverage=0.9 and the counts a 50, b 30, c 15, d 5 → a, b, c, if at least two are kept.
        room = kind.size - len(SPECIALS)
        tokens = lambda letter: 1 + _goes_on(letter, backend)  # noqa: E731
        letters = sorted(_covering(ranked, kind.coverage, room, tokens))
    inner = ["##" + letter for letter in letters if _goes_on(letter, backend)]
    characters = f"{len(letters)} characters, {len(inner)} of them also within words"
    _check_size(
        kind.size, len(letters) + len(inner), characters, f", or lower {argument(alphabet='N')}"
    )
    trainer = trainers.WordPieceTrainer(
        vocab_size=kind.size,
        min_frequency=kind.min_frequency,
        special_tokens=[*SPECIALS, *letters, *inner],  # so that the trainer keeps this order
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        show_progress=False,
    )
    backend.train_from_iterator(reader(texts), trainer)
    return bert_backend(backend.get_vocab(), pipeline)


def _covering(
    ranked: list[tuple[str, int]], coverage: float, room: int, tokens: Callable[[str], int]
) -> list[str]:
    """Return the first characters, and those after them up to the coverage or the room.

    Args:
        room: the number of tokens that may be characters.
        tokens: returns how many tokens a character needs.
    """
    letters, total, covered = list[str](), sum(count for _, count in ranked), 0
    for letter, count in ranked:
        room -= tokens(letter)
        if len(letters) >= ALPHABET and (covered >= coverage * total or room < 0):
            break
        letters.append(letter)
        covered += count
    return letters


def _goes_on(letter: str, backend: Backend) -> bool:
    """Return True if a word can continue with the character."""
    normal = backend.normalizer.normalize_str("a" + letter)
    return len(backend.pre_tokenizer.pre_tokenize_str(normal)) == 1


def _learn_byte_bpe(texts: Sample, kind: ByteBPE, reader: Reader) -> Backend:
    # Sorted, since the library returns them in an order that varies.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    needed = len(alphabet) if texts.characters else 0
    _check_size(kind.size, needed, f"{len(alphabet)} bytes")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind.prefix_space)
    trainer = trainers.BpeTrainer(
        vocab_size=kind.size,
        min_frequency=kind.min_frequency,
        special_tokens=ROBERTA,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(reader(texts), trainer)
    return backend


def _learn_unigram(texts: Sample, kind: Unigram, reader: Reader) -> Backend:
    backend = Backend(models.Unigram())
    backend.normalizer = _sentencepiece_normalizer(kind)
    steps = [pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.Metaspace()
    counts = Counter[str]()
    for text in texts.read():
        counts.update(backend.normalizer.normalize_str(text))
    del counts[" "]
    ranked_letters = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    room = kind.size - len(SPECIALS) - 1  # without "▁", which every text begins with
    letters = {*_covering(ranked_letters, kind.coverage, room, lambda letter: 1)}
    needed = len(letters | {"▁"}) if letters else 0
    _check_size(kind.size, needed, f"{needed} characters", ", or drop texts with rare characters")
    # A rare character becomes a space in training, and so unknown afterwards
    rare = dict.fromkeys(map(ord, counts.keys() - letters), " ")
    scores = _unigram_scores(backend, _without(rare, reader(texts), kind), kind, kind.size)
    # The trainer drops rare pieces once more after it has come down to the size.
    if len(SPECIALS) + len(scores) < kind.size:
        normalised = _without(rare, texts.read(), kind)
        scores = _unigram_scores(backend, normalised, kind, kind.size * 3 // 2)
    ranked = sorted(_steady(scores).items(), key=lambda item: (-item[1], item[0]))
    single = [piece for piece, _ in ranked if len(piece) == 1]
    longer = [piece for piece, _ in ranked if len(piece) > 1]
    # The trainer may exceed the size: asked for more, or with room for single characters only.
    retained = {*single, *longer[: kind.size - len(SPECIALS) - len(single)]}
    pieces = [item for item in ranked if item[0] in retained]
    backend.model = models.Unigram([(name, 0.0) for name in SPECIALS] + pieces, unk_id=1)
    return backend


def _without(rare: dict[int, str], texts: Iterator[str], kind: Unigram) -> Iterator[str]:
    """Return normalised texts without rare characters, or the same texts if there are none.

    The trainer itself keeps every character of its text.
    """
    if not rare:
        return texts
    # A normaliser of its own: the tokenizer in training is locked while the trainer reads.
    normalizer = _sentencepiece_normalizer(kind)
    return (normalizer.normalize_str(text).translate(rare) for text in texts)


def _unigram_scores(
    backend: Backend, texts: Iterator[str], kind: Unigram, size: int
) -> dict[str, float]:
    """Return pieces with log probabilities: `size` with special tokens, or as many as are found."""
    trainer = trainers.UnigramTrainer(
        vocab_size=size,
        special_tokens=SPECIALS,
        unk_token="[UNK]",
        max_piece_length=kind.longest,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    vocabulary = json.loads(backend.to_str())["model"]["vocab"]
    return {piece: score for piece, score in vocabulary if piece not in SPECIALS}


def removed_marks(texts: Iterable[str]) -> tuple[float, str]:
    """Return the share of letters with a mark that `strip_accents` removes, and the most frequent.

    Marks are those of Unicode's category Mn after its decomposition NFD: accents and umlauts, but
    also the voiced marks of Japanese and most vowel signs of Hindi. Of the first 1,000 texts the
    first 2,000 characters are read.

        ["größer"] → (1 / 6, "ö")
    """
    counts = Counter[str]()
    for text in itertools.islice(texts, 1000):
        counts.update(text[:2000])
    decomposed = {letter: unicodedata.normalize("NFD", letter) for letter in counts}
    categories = {x: {*map(unicodedata.category, text)} for x, text in decomposed.items()}
    marked = Counter({x: count for x, count in counts.items() if "Mn" in categories[x]})
    letters = sum(n for x, n in counts.items() if x.isalpha() or x in marked)
    [(letter, _)] = marked.most_common(1) or [("", 0)]
    return marked.total() / max(letters, 1), letter


def _sentencepiece_normalizer(kind: Unigram) -> normalizers.Normalizer:
    """Return a normaliser: no control characters, single spaces, NFKC, options of `kind`."""
    steps: list[normalizers.Normalizer] = [normalizers.Nmt(), normalizers.NFKC()]
    if kind.lowercase if kind.strip_accents is None else kind.strip_accents:
        steps += [normalizers.NFD(), normalizers.StripAccents(), normalizers.NFC()]
    if kind.lowercase:
        steps.append(normalizers.Lowercase())
    return normalizers.Sequence([*steps, normalizers.Replace(tokenizers.Regex(r"\s+"), " ")])


def _steady(scores: dict[str, float]) -> dict[str, float]:
    """Return scores that do not depend on the order in which the trainer read the words.

    The trainer gives characters that no word needs the least score plus a step each, in the order
    of a hash table. Here they all get the least score.
    """
    # The scores least, least + step, least + 2 · step … are those of unneeded characters
    least = rung = min(scores.values())
    steady = dict(scores)
    for piece in sorted((piece for piece in scores if len(piece) == 1), key=scores.__getitem__):
        if abs(scores[piece] - rung) < 1e-12:
            steady[piece] = least
            rung += _CHARACTER_STEP
    return {piece: round(score, _DECIMALS) for piece, score in steady.items()}


def _normal_characters(texts: Sample, backend: Backend) -> Counter[str]:
    """Count the characters after BERT's normaliser, which works on single characters."""
    # One counter for each code point of Unicode; each distinct character is normalised once.
    raw = np.zeros(0x110000, dtype=np.int64)
    for block in texts.blocks:
        codes = np.frombuffer("".join(block).encode("utf-32-le"), dtype=np.uint32)
        raw += np.bincount(codes, minlength=len(raw))
    counts = Counter[str]()
    for code in np.flatnonzero(raw).tolist():
        for character in backend.normalizer.normalize_str(chr(code)):
            counts[character] += int(raw[code])
    return Counter({letter: count for letter, count in counts.items() if not letter.isspace()})


def _check_size(size: int, needed: int, alphabet: str, otherwise: str = "") -> None:
    """Check that a vocabulary has room for the `needed` tokens of the alphabet; 0 for no text."""
    if needed == 0:
        message = "there is no text to learn a vocabulary from"
        raise TokenizerError(message, fix="Give files with text in them.")
    least = len(SPECIALS) + needed
    if size < least:
        special = f"{len(SPECIALS)} special tokens"
        message = f"a vocabulary of {size} cannot hold {special} and {alphabet}"
        fix = f"Set {argument(size=least)} or more{otherwise}."
        raise TokenizerError(message, where="size", fix=fix)
