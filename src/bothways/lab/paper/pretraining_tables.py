"""Tables on pre-training as data: which runs a table has, and how its rows are fine-tuned.

A table is a number of pre-training runs that differ in one point and are equal in text, vocabulary
and budget. Each row is a run whose model is fine-tuned.

Sources: Devlin et al. 2018 (sections 5.1, 5.2, C.1, C.2); Liu et al. 2019; Lan et al. 2019; Clark
et al. 2020; Wettig et al. 2022.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from bothways.data.masking import Masking
from bothways.data.segments import FullSentences, NextSentence, Segments
from bothways.lab.paper import Scale
from bothways.lab.paper.experiment import PUBLISHED, Published
from bothways.model.attention.patterns import Causal
from bothways.model.config import EncoderConfig, Sharing
from bothways.model.families import albert, bert, electra, gpt
from bothways.objectives import masked_lm
from bothways.objectives.causal_lm import CausalLM
from bothways.objectives.objective import Objective
from bothways.objectives.replaced_tokens import ReplacedTokens
from bothways.objectives.sentence_order import MaskedLMSentenceOrder
from bothways.pretraining.config import PretrainConfig


@dataclass(frozen=True)
class PretrainCell:
    """A pre-training run of a table; None for what is the table's own.

    Attributes:
        name: name of its folder.
        title: name of its row, as in the published table, where it has this row.
        segments: segments of the phases that read the objective's.
        masking: masking of objectives that hide tokens.
        encoder: change of the table's encoder.
        copies: `data_copies`; 0 for new masks in every epoch.
        share: fraction of the budget.
        finetuned: False for a run of which only the held-out loss counts.
        note: description of the row, if the title is not one.
    """

    name: str
    title: str
    objective: Objective | None = None
    segments: Segments | None = None
    masking: Masking | None = None
    encoder: Callable[[EncoderConfig], EncoderConfig] | None = None
    copies: int | None = None
    share: float = 1.0
    finetuned: bool = True
    note: str = ""

    def settings(self, base: PretrainConfig) -> PretrainConfig:
        """Return the settings of the run, given the table's."""
        encoder = base.encoder if self.encoder is None else self.encoder(base.encoder)
        masking = self.masking
        # The masks of replaced token detection are part of the method.
        own_masks = isinstance(self.objective, ReplacedTokens)
        if isinstance(base.objective, masked_lm.MaskedObjective) and not own_masks:
            masking = masking or base.objective.masking
        objective = masked_lm.with_masking(self.objective or base.objective, masking)
        phases = tuple(
            dataclasses.replace(
                phase,
                segments=phase.segments or self.segments,
                masking=None if objective.masking is None or own_masks else phase.masking,
            )
            for phase in base.phases
        )
        until, scored = base.training.end.part(self.share), base.evaluation_masking
        if isinstance(objective, ReplacedTokens):
            scored = objective.masking
        return dataclasses.replace(
            base,
            encoder=encoder,
            objective=objective,
            phases=phases,
            training=dataclasses.replace(base.training, until=until),
            data_copies=base.data_copies if self.copies is None else self.copies or None,
            evaluation_masking=scored,
        )


@dataclass(frozen=True)
class PretrainTable:
    """A table on pre-training.

    Attributes:
        encoder: encoder of its runs, at the size of the paper.
        cells: the pre-training runs in the order of their rows; the others are compared with the
            first one.
        columns: the tasks of the paper, as named in `COLUMNS`.
        published: the published rows, by the same names.
        held_out: further columns: metrics of held-out text, by their title.
        fitted: metric of held-out text that is fitted by parameters and tokens; "" for none.
        notes: differences from the published table.
    """

    title: str
    encoder: Callable[[], EncoderConfig]
    objective: Objective
    cells: tuple[PretrainCell, ...]
    columns: tuple[str, ...]
    published: tuple[Published, ...]
    held_out: tuple[tuple[str, str], ...] = (("perplexity", "held-out/perplexity"),)
    fitted: str = ""
    notes: tuple[str, ...] = ()


COLUMNS = {
    "MNLI-m": ("MNLI", "accuracy"),
    "QNLI": ("QNLI", "accuracy"),
    "QQP": ("QQP", "accuracy"),
    "MRPC": ("MRPC", "accuracy"),
    "SST-2": ("SST-2", "accuracy"),
    "CoLA": ("CoLA", "mcc"),
    "STS-B": ("STS-B", "spearman"),
    "RTE": ("RTE", "accuracy"),
    "SQuAD 1.1 F1": ("v1.1", "f1"),
    "SQuAD 2.0 F1": ("v2.0", "f1_best"),
    "NER": ("CoNLL-2003", "f1"),
    "NER features": ("concat-last-four", "f1"),
}
"""Task and metric of each column."""


def scaled(encoder: EncoderConfig, scale: Scale) -> EncoderConfig:
    """Return an encoder at a scale: small has a third of the layers and a quarter of all widths.

    BERT-base becomes 4 layers of 192 with 3 heads. Weights start wider, as for any narrow encoder.
    """
    if scale == "paper":
        return encoder
    quarter = {
        name: max(1, value // 4)
        for name in ("width", "heads", "intermediate_size", "embedding")
        if (value := getattr(encoder, name)) is not None
    }
    return dataclasses.replace(
        encoder,
        **quarter,
        depth=max(1, encoder.depth // 3),
        initial_range=2 * encoder.initial_range,
    )


def causal(encoder: EncoderConfig) -> EncoderConfig:
    """Return the encoder with attention to the left only."""
    return dataclasses.replace(encoder, patterns=(Causal(),))


def gpt_of(encoder: EncoderConfig) -> EncoderConfig:
    """Return a GPT of the encoder's size: no segments, no LayerNorm after the embeddings."""
    shape = gpt.base()
    return dataclasses.replace(
        causal(encoder), segments=0, order=shape.order, activation=shape.activation
    )


def _sized(depth: int, width: int, heads: int) -> Callable[[EncoderConfig], EncoderConfig]:
    """Build a function that resizes an encoder in proportion to BERT-base."""
    base = bert.base()

    def resize(encoder: EncoderConfig) -> EncoderConfig:
        """Return the encoder with this size."""
        return dataclasses.replace(
            encoder,
            depth=max(1, encoder.depth * depth // base.depth),
            width=encoder.width * width // base.width,
            heads=max(1, encoder.heads * heads // base.heads),
            intermediate_size=encoder.intermediate_size * width // base.width,
        )

    return resize


def _sharing(scope: Literal["attention", "mlp"]) -> Callable[[EncoderConfig], EncoderConfig]:
    """Return the change after which layers share this part alone."""
    return lambda encoder: dataclasses.replace(encoder, sharing=Sharing(parts=scope))


_SIZES = {
    f"L={depth} H={width} A={heads}": _sized(depth, width, heads)
    for depth, width, heads in (
        (3, 768, 12), (6, 768, 3), (6, 768, 12), (12, 768, 12), (12, 1024, 16), (24, 1024, 16)
    )
}  # fmt: skip
_MIXES = ((80, 10, 10), (100, 0, 0), (80, 0, 20), (80, 20, 0), (0, 20, 80), (0, 0, 100))
"""Shares of [MASK], of the token itself, and of random tokens, in percent."""
_RATES = (15, 20, 30, 40, 50, 60, 70, 80)
_PAIRS = masked_lm.MaskedLMNextSentence(NextSentence(short=0.1))


def _mixed(mask: int, random: int, rate: float) -> Masking:
    return Masking(rate, mask=mask / 100, random=random / 100)


def _named(title: str, **changes: Any) -> PretrainCell:
    """Return a run with a folder named as its row: "40 %, 80/10/10" → "40-80-10-10"."""
    words = "".join(c if c.isalnum() else " " for c in title.lower()).split()
    return PretrainCell("-".join(words), title, **changes)


TABLES = {
    "bert-5": PretrainTable(
        "Pre-training tasks (Devlin et al. 2018, section 5.1, table 5)",
        bert.base,
        _PAIRS,
        (
            PretrainCell("base", "BERT-Base"),
            PretrainCell(
                "no-nsp",
                "No NSP",
                masked_lm.MaskedLM(),
                NextSentence(short=0.1),
                note="the same pairs, without the loss on them",
            ),
            PretrainCell(
                "ltr",
                "LTR & No NSP",
                CausalLM(),
                encoder=causal,
                note="left to right, also in fine-tuning",
            ),
            PretrainCell(
                "gpt",
                "GPT",
                CausalLM(),
                encoder=gpt_of,
                note="a GPT of the same size, text and budget",
            ),
        ),
        ("MNLI-m", "QNLI", "MRPC", "SST-2", "SQuAD 1.1 F1", "NER"),
        PUBLISHED["BERT_5"],
        notes=(
            "The published table has no column for entities: a left-to-right model reads nothing "
            "to the right of a word there.",
            "Left-to-right models predict every token, masked ones a part: perplexities of "
            "different objectives do not compare.",
            "GPT has no row in the published table: its text and size are BERT's here.",
            "The published row with a BiLSTM on the left-to-right model is not run.",
        ),
    ),
    "bert-6": PretrainTable(
        "Model size (Devlin et al. 2018, section 5.2, table 6)",
        bert.base,
        _PAIRS,
        (
            *(_named(title, encoder=size) for title, size in _SIZES.items()),
            *(
                _named(
                    f"{title} at {share} %",
                    encoder=_SIZES[title],
                    share=share / 100,
                    finetuned=False,
                )
                for title in ("L=3 H=768 A=12", "L=6 H=768 A=12", "L=12 H=768 A=12")
                for share in (50, 25)
            ),
        ),
        ("MNLI-m", "MRPC", "SST-2"),
        PUBLISHED["BERT_6"],
        fitted="held-out/loss/masked",
        notes=(
            "In equal time a larger model reads less text; with a budget in steps all read the "
            "same, as in the paper.",
            "Rows at 50 and 25 % are for the fit of the loss, and not fine-tuned.",
        ),
    ),
    "bert-8": PretrainTable(
        "Masking procedures (Devlin et al. 2018, appendix C.2, table 8)",
        bert.base,
        _PAIRS,
        tuple(
            _named(f"{mask}/{same}/{random}", masking=_mixed(mask, random, 0.15))
            for mask, same, random in _MIXES
        ),
        ("MNLI-m", "NER", "NER features"),
        PUBLISHED["BERT_8"],
    ),
    "masking-rate": PretrainTable(
        "Masking rates (Wettig et al. 2022)",
        bert.base,
        masked_lm.MaskedLM(),
        (
            *(_named(f"{rate} %", masking=_mixed(100, 0, rate / 100)) for rate in _RATES),
            *(
                _named(f"{rate} %, 80/10/10", masking=_mixed(80, 10, rate / 100))
                for rate in (15, 40)
            ),
        ),
        ("MNLI-m", "QNLI", "QQP", "SST-2"),
        PUBLISHED["MASKING_RATE"],
        notes=("The published rows are of a large model, pre-norm, in batches of 4,096.",),
    ),
    "roberta-1": PretrainTable(
        "Static and dynamic masks (Liu et al. 2019, table 1)",
        bert.base,
        masked_lm.MaskedLM(),
        (_named("static", copies=10), _named("dynamic", copies=0)),
        ("SQuAD 2.0 F1", "MNLI-m", "SST-2"),
        PUBLISHED["ROBERTA_1"],
        notes=(
            "Static masks repeat after ten epochs: a run of fewer epochs has the same masks in "
            "both rows.",
        ),
    ),
    "roberta-2": PretrainTable(
        "Input formats (Liu et al. 2019, table 2)",
        bert.base,
        masked_lm.MaskedLM(),
        (
            _named("SEGMENT-PAIR", objective=_PAIRS),
            _named("FULL-SENTENCES", objective=masked_lm.MaskedLM()),
            _named("DOC-SENTENCES", objective=masked_lm.MaskedLM(FullSentences(cross=False))),
        ),
        ("SQuAD 1.1 F1", "SQuAD 2.0 F1", "MNLI-m", "SST-2"),
        PUBLISHED["ROBERTA_2"],
        notes=("SENTENCE-PAIR, two single sentences an input, is not run.",),
    ),
    "albert-sentences": PretrainTable(
        "Sentence losses (Lan et al. 2019, table 5)",
        albert.base,
        masked_lm.MaskedLM(),
        (
            _named("none", objective=masked_lm.MaskedLM()),
            _named("NSP", objective=_PAIRS),
            _named("SOP", objective=MaskedLMSentenceOrder()),
        ),
        ("MNLI-m", "SST-2"),
        PUBLISHED["ALBERT_SENTENCES"],
        held_out=(("MLM accuracy", "held-out/accuracy/masked"),),
        notes=("The published accuracies of pair heads on both kinds of pairs are not measured.",),
    ),
    "albert-sharing": PretrainTable(
        "Shared layers (Lan et al. 2019, table 4)",
        albert.base,
        MaskedLMSentenceOrder(),
        (
            _named("all shared"),
            _named("attention shared", encoder=_sharing("attention")),
            _named("FFN shared", encoder=_sharing("mlp")),
            _named(
                "not shared",
                encoder=lambda x: dataclasses.replace(x, sharing=Sharing(groups=x.depth)),
            ),
        ),
        ("MNLI-m", "SST-2"),
        PUBLISHED["ALBERT_SHARING"],
    ),
    "electra": PretrainTable(
        "Replaced token detection and masked LM (Clark et al. 2020, section 3.4)",
        electra.PRESETS["electra-base-discriminator"],
        masked_lm.MaskedLM(masking=Masking(0.15)),
        (
            _named("BERT"),
            _named("ELECTRA", objective=ReplacedTokens()),
        ),
        ("MNLI-m", "QNLI", "QQP", "MRPC", "SST-2", "CoLA", "STS-B", "RTE"),
        PUBLISHED["ELECTRA_GAINS"],
        held_out=(("F1 of replaced tokens", "held-out/f1/replaced"),),
        notes=(
            "From random weights a network detects nothing within minutes; after masked LM it "
            "does.",
        ),
    ),
    "steps": PretrainTable(
        "Number of training steps (Devlin et al. 2018, appendix C.1, figure 5)",
        bert.base,
        _PAIRS,
        tuple(
            PretrainCell(
                f"{name.lower()}-{share}",
                f"{name} at {share} %",
                objective,
                encoder=change,
                share=share / 100,
            )
            for name, objective, change in (("MLM", None, None), ("LTR", CausalLM(), causal))
            for share in (25, 50, 100)
        ),
        ("MNLI-m",),
        (),
        notes=(
            "Each row is a run of its own, whose rate has fallen to 0 at its end; the figure's "
            "points are states of one run.",
        ),
    ),
}
