"""Configurations: reading is the inverse of writing for every class that is one, and every mistake names its place."""

import dataclasses
import inspect
import json
import math
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from pydantic import BeforeValidator

from bothways.core.config import reader as configs
from bothways.core.config.values import (
    checked,
    parse_overrides,
    read_toml,
    require_at_least,
    require_range,
    write_toml,
)
from bothways.core.errors import ConfigError, setting
from bothways.data.masking import Masking
from bothways.data.segments import FullSentences
from bothways.model.config import EncoderConfig, PreNorm
from bothways.objectives.masked_lm import MaskedLM
from bothways.pretraining.config import PretrainConfig, PretrainPhase
from bothways.pretraining.recipes import modern
from bothways.training.optimizers import BertAdam, Lamb
from bothways.training.run import Target
from bothways.training.schedules import WSD, Constant, Cosine, Epochs, Hours, Linear, Steps

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


def _without_none(value: object) -> object:
    match value:
        case None:
            return "none"
        case dict():
            return {key: _without_none(item) for key, item in value.items()}
        case list():
            return [_without_none(item) for item in value]
        case _:
            return value


flat = plain | st.lists(plain)


@given(st.dictionaries(st.text(), flat | st.dictionaries(st.text(), flat)))
def test_toml_is_read_as_it_was_written(tree):
    assert tomllib.loads(write_toml(tree)) == _without_none(tree)


def test_tables_in_lists_in_tables_are_written():
    tree = {
        "a b": {"rows": [{"x": 1, "sub": {"y": []}}, {"x": 2}], "z": -math.inf},
        "plain": '\x7f\n"é😀',
        "mixed": ["full", {"radius": 64, "kind": "window"}],
    }
    assert tomllib.loads(write_toml(tree)) == tree


BASE = dataclasses.replace(modern(EncoderConfig(1000, 64, 2, 4, 128)), phases=(PretrainPhase(128),))


def load(*overrides: str) -> PretrainConfig:
    return configs.load(PretrainConfig, base=BASE, overrides=overrides)


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        'seed = 1\ndata_copies = 3\n[training]\nuntil = "2 epochs"\ntarget = "none"\n[training.schedule]\nkind = "constant"\nwarmup = 0.1\n[training.optimizer]\nlr = 0.5\n[encoder]\ndepth = 5\n'
    )
    overrides = ["seed=2", "encoder.depth=6"]
    # A file that was written by a run says "none" where there is no table.
    overrides += ["training.target.metric=loss", "training.target.at_most=3"]
    # Naming a kind, or that of the file once more, does not drop its settings.
    overrides += ["training.schedule=constant", "training.optimizer=lamb"]
    config = configs.load(PretrainConfig, base=BASE, file=file, overrides=overrides)
    assert (config.seed, config.data_copies, config.training.until) == (2, 3, Epochs(2.0))
    assert config.training.schedule == Constant(0.1)
    assert isinstance(config.training.optimizer, Lamb)
    assert config.training.optimizer.lr == 0.5
    assert config.training.target == Target("loss", 3.0)
    assert config.encoder == dataclasses.replace(BASE.encoder, depth=6)
    assert config.objective == BASE.objective


@pytest.mark.parametrize(
    ("table", "change", "expected"),
    [
        ('[training.schedule]\nwarmup = "5 steps"', "cosine", Cosine(Steps(5))),
        ('[training.schedule]\nkind = "linear"\nwarmup = "5 steps"', "linear", Linear(Steps(5))),
        ('[training.schedule]\nkind = "linear"\nwarmup = "5 steps"', "cosine", Cosine(Steps(5))),
        ('[training.schedule]\nkind = "polynomial"\npower = 2.0', "cosine", Cosine()),
        ('[training.schedule]\nkind = "cosine"\nwarmup = 0.2', "wsd", WSD(0.2)),
        ('[training.schedule]\nwarmup = "5 steps"', '{kind = "constant"}', Constant()),
    ],
)
def test_a_kind_that_is_named_keeps_the_settings_of_its_table(table, change, expected, tmp_path):
    """An inline table takes the place of one."""
    file = tmp_path / "run.toml"
    file.write_text(table)
    base = dataclasses.replace(BASE, training=dataclasses.replace(BASE.training, schedule=Linear()))
    changed = configs.load(
        PretrainConfig, base=base, file=file, overrides=[f"training.schedule={change}"]
    )
    assert changed.training.schedule == expected


def test_the_kind_of_the_base_over_a_file_has_the_settings_of_the_base(tmp_path):
    file, own = tmp_path / "run.toml", dataclasses.replace(BASE.training.optimizer, lr=7e-4)
    file.write_text('[training.optimizer]\nkind = "lamb"\nlr = 0.5\ndecay = 0.3')
    base = dataclasses.replace(BASE, training=dataclasses.replace(BASE.training, optimizer=own))
    kind, default = "training.optimizer.kind=adamw", "training.optimizer.lr=1e-4"
    for words, lr in (([kind], 7e-4), ([kind, default], 1e-4)):
        config = configs.load(PretrainConfig, base=base, file=file, overrides=words)
        assert config.training.optimizer == dataclasses.replace(own, lr=lr, decay=0.3)
        [note] = configs.replaced_members(config, base, file)
        assert "0.5" in note
        assert "0.3" not in note


def test_settings_of_a_file_that_another_kind_lacks_are_told(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        '[training.schedule]\nkind = "polynomial"\nwarmup = 0.1\npower = 2.0\n[training.optimizer]\nkind = "adamw"\nlr = 0.5\ndecay = 0.3'
    )
    words = ["training.schedule=cosine", "training.optimizer.kind=lamb"]
    config = configs.load(PretrainConfig, base=BASE, file=file, overrides=words)
    assert config.training.schedule == Cosine(0.1)
    assert config.training.optimizer == Lamb(betas=BASE.training.optimizer.betas, decay=0.3)
    notes = dict(note.split("=", 1) for note in configs.replaced_members(config, BASE, file))
    assert notes.keys() == {"training.schedule", "training.optimizer"}
    assert "power" in notes["training.schedule"]
    assert "warmup" not in notes["training.schedule"]
    assert "0.5" in notes["training.optimizer"]
    assert "0.3" not in notes["training.optimizer"]
    same = configs.load(PretrainConfig, base=BASE, file=file)
    assert not [*configs.replaced_members(same, BASE, file)]


def test_another_kind_keeps_settings_of_a_file_within_a_table_that_changes(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[objective]\nkind = "masked_lm"\n[objective.masking]\nrate = 0.3')
    words = ["objective.kind=gpt_bert", "objective.masking.mask=0.7"]
    masking = configs.load(PretrainConfig, base=BASE, file=file, overrides=words).objective.masking
    assert (masking.rate, masking.mask) == (0.3, 0.7)


@pytest.mark.parametrize("value", ["foo", False, math.nan])
def test_what_is_no_kind_over_a_table_of_a_file_is_refused_where_it_is_given(value, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[training.optimizer]\nkind = "lamb"\n[sharding]\nkind = "sharding"')
    with pytest.raises(ConfigError, match="is given, but it must be one of adamw") as refused:
        configs.load(PretrainConfig, base=BASE, file=file, overrides={"training.optimizer": value})
    assert refused.value.where == "training.optimizer"
    # A value of another type replaces the table.
    assert (
        configs.load(PretrainConfig, base=BASE, file=file, overrides=["sharding=auto"]).sharding
        == "auto"
    )


@pytest.mark.parametrize("value", ["0.2", "foo"])
def test_a_text_is_no_table_without_kinds(value, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[encoder.dropout]\nhidden = 0.1")
    with pytest.raises(ConfigError, match=rf"^encoder\.dropout: '{value}' .*must be a table"):
        configs.load(PretrainConfig, base=BASE, file=file, overrides=[f"encoder.dropout={value}"])


CHANGES = [
    "",
    "training.until.kind=tokens training.until.count=12",
    "training.until.kind=epochs training.until.count=0.3 training.evaluate.kind=steps training.evaluate.count=7",
    "training.until.kind=hours training.until.count=1e-300",
    "training.optimizer=bert_adam training.optimizer.betas=0.8,0.1",
    "training.optimizer=lamb training.optimizer.lr=1e-300 training.clip_norm=1e300",
    "training.optimizer=stable_adamw training.optimizer.decay=0.3 training.clip_norm=none",
    "training.optimizer=muon training.optimizer.momentum=0.7 training.optimizer.others.eps=1e-9",
    "training.schedule=linear training.schedule.warmup.kind=tokens training.schedule.warmup.count=9",
    "training.schedule=polynomial training.schedule.power=2.5 training.schedule.floor=1e-9",
    "training.schedule=wsd training.schedule.decay=0.1 training.schedule.shape=sqrt",
    'training.keep.best.metric=数"\\ training.keep.best.direction=lowest training.keep.last=3',
    "encoder.order=post encoder.norm_epsilon=1e-12 encoder.dropout.hidden=0.25 encoder.pad=3",
    "encoder.position=learned encoder.position.max_positions=999 encoder.pad=none",
    "objective=masked_lm objective.segments.cross=false objective.masking.max_predictions=20",
    "objective=masked_lm_nsp objective.segments.short=0.3 objective.masking.unit=whole_words",
    "phases.0.share=0.9 phases.1.length=512 phases.1.share=0.1 encoder.position=learned encoder.position.max_positions=512",
    "batch.kind=token_ramp batch.start=1 batch.n=5 batch.over=9 data_copies=3",
    f"batch.kind=tokens batch.n=4096 data_copies=none seed={-(2**62)}",
]


@pytest.mark.parametrize("changes", CHANGES)
def test_a_configuration_is_what_its_toml_and_its_json_say(changes):
    config = load(*changes.split())
    assert configs.read(PretrainConfig, tomllib.loads(configs.to_toml(config))) == config
    again = configs.read(PretrainConfig, json.loads(json.dumps(configs.to_dict(config))))
    assert again == config
    assert configs.fingerprint(again) == configs.fingerprint(config)
    assert (configs.fingerprint(BASE) == configs.fingerprint(config)) == (not changes)


OTHER_ADAM = BertAdam(lr=5e-4, betas=(0.9, 0.98))
FASTER = dataclasses.replace(BASE.training.optimizer, lr=3e-5)


@pytest.mark.parametrize(("override", "expected"), [
    ("encoder.depth=6", lambda c: c.encoder.depth == 6),
    ("training.optimizer.lr=3e-5", lambda c: c.training.optimizer == FASTER),
    ("training.optimizer=bert_adam", lambda c: c.training.optimizer == OTHER_ADAM),
    ("training.optimizer.kind=bert_adam", lambda c: c.training.optimizer == OTHER_ADAM),
    ("training.optimizer.betas=0.8, 0.9", lambda c: c.training.optimizer.betas == (0.8, 0.9)),
    ("training.optimizer.betas=[0.8, 0.9]", lambda c: c.training.optimizer.betas == (0.8, 0.9)),
    ("training.clip_norm=none", lambda c: c.training.clip_norm is None),
    ("training.schedule.warmup=0.25", lambda c: c.training.schedule == Linear(0.25)),
    ("training.schedule.warmup=30 minutes", lambda c: c.training.schedule.warmup == Hours(0.5)),
    ("training.until=30 seconds", lambda c: c.training.until == Hours(30 / 3600)),
    ("phases.0.length=64", lambda c: c.phases == (PretrainPhase(64),)),
    ("objective.kind=masked_lm", lambda c: c.objective == MaskedLM(masking=Masking(0.4))),
    (
        "phases.0.share=0.9,phases.1.length=64,phases.1.share=0.1",
        lambda c: c.phases == (PretrainPhase(128, 0.9), PretrainPhase(64, 0.1)),
    ),
    ("encoder.order=pre", lambda c: c.encoder.order == PreNorm()),
])  # fmt: skip
def test_a_text_becomes_what_the_field_is(override, expected):
    assert expected(load(*(override.split(",") if "phases.1" in override else [override])))


def test_lists_tables_and_booleans_are_written_as_in_a_file_and_the_last_holds():
    read = load("phases=[{length=32, share=0.75}, {length=64, share=0.25}]")
    assert read.phases == (PretrainPhase(32, 0.75), PretrainPhase(64, 0.25))
    assert load("encoder.dropout={hidden=0.25}").encoder.dropout.hidden == 0.25
    assert load('training.schedule={kind="constant"}').training.schedule == Constant(0.06)
    assert load("seed=1", "seed=2").seed == 2
    assert configs.read(FullSentences, {"cross": "false"}) == FullSentences(cross=False)


def test_blanks_belong_to_a_value_only_in_quotes():
    read = parse_overrides(["prompt= query: ", "a.b=x y"])
    assert read == {"prompt": "query:", "a": {"b": "x y"}}
    assert parse_overrides(['prompt= "query: " ']) == {"prompt": "query: "}
    assert parse_overrides(['prompt=""']) == {"prompt": ""}
    assert parse_overrides([r'prompt="caf\u00e9 \"a\" "']) == {"prompt": 'café "a" '}
    two = '"a" and "b"'  # not one quoted text
    assert parse_overrides([f"prompt={two}"]) == {"prompt": two}


def test_none_drops_earlier_settings_of_its_table():
    words = ["shuffle=windows", "shuffle.documents=24", "shuffle=none", "shuffled.run=1"]
    assert parse_overrides(words) == {"shuffle": "none", "shuffled": {"run": "1"}}
    # In Python a table may follow one of its settings, which counts nevertheless.
    assert parse_overrides({"batch.n": 2, "batch": {"n": 1, "kind": "examples"}}) == {
        "batch": {"n": 2, "kind": "examples"}
    }


@pytest.mark.parametrize(("text", "overrides", "where"), [
    ("lenght = 3", [], "run.toml: lenght: unknown key"),
    ("[training]\nclip = 1", ["training.ema=0.9"], "run.toml: training.clip: unknown key"),
    ("[training.schedule]\nwarmup = 'soon'", [], "run.toml: training.schedule.warmup: "),
    ('batch = "examples"', ["seed=1"], "run.toml: batch.n: is missing"),
    ("phases = [{length = 32}]", ["phases.2.length=8"], "phases.2: there are items 0 to 0"),
    ("training.until = 2", [], "run.toml: training.until: invalid duration '2'"),
    ("batch = 16", [], "run.toml: batch: 16 is given, but it must be one of examples, tokens, token_ramp\n  Write, for example, batch = "),
    ("seed = true", [], "run.toml: seed: True is given, but it must be a whole number"),
    ("seed = 2026-01-01", [], "run.toml: seed: 2026-01-01 is given, but it must be a whole number"),
    ("data_copies = 3", ["seed=x"], "seed: 'x' is given"),
    ("seed = 1", ["seed=x"], "seed: 'x' is given"),
    ("[training]\nseed = 1", ["training.clip=1"], "run.toml: training.seed: unknown key"),
    ("[training]\nevaluate = '1 epochs'", ["training.clip=1"], "training.clip: unknown key"),
])  # fmt: skip
def test_a_mistake_in_a_file_names_the_file(text, overrides, where, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(text)
    with pytest.raises(ConfigError, match=f"^{re.escape(where)}"):
        configs.load(PretrainConfig, base=BASE, file=Path("run.toml"), overrides=overrides)


def test_advice_of_a_configuration_is_spelled_where_it_is_shown():
    @dataclasses.dataclass(frozen=True)
    class Picky:
        def __post_init__(self) -> None:
            raise ConfigError("is wrong", fix=setting("a.b", True))

    with pytest.raises(ConfigError) as error:
        configs.read(Picky, {})
    assert '"a.b": true' in error.value.message("json")


def test_numbers_reach_into_the_lists_of_a_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("phases = [{length = 32, share = 0.5}, {length = 64, share = 0.5}]\n")
    config = configs.load(PretrainConfig, base=BASE, file=file, overrides=["phases.1.length=48"])
    assert config.phases == (PretrainPhase(32, 0.5), PretrainPhase(48, 0.5))
    words = ["phases.0.share=0.2", "phases.3.length=8", "phases.2.length=16"]
    words += ["phases.2.share=0.2", "phases.3.share=0.1"]
    config = configs.load(PretrainConfig, base=BASE, file=file, overrides=words)
    shares = [(32, 0.2), (64, 0.5), (16, 0.2), (8, 0.1)]
    assert config.phases == tuple(PretrainPhase(*share) for share in shares)
    with pytest.raises(ConfigError, match=r"^phases\.3: there are items 0 to 1"):
        configs.load(PretrainConfig, base=BASE, file=file, overrides=["phases.3.length=48"])


@pytest.mark.parametrize(("override", "where", "near"), [
    ("training.optimizer.decai=1", "training.optimizer.decai", "decay"),
    ("training.optimizer.momentum=0.9", "training.optimizer.momentum", "optimizer.kind=muon"),
    ("training.optimizer.kind=adam", "training.optimizer.kind", "adamw"),
    ("training.optimizer=adam", "training.optimizer", "training.optimizer=adamw"),
    ("training.optimizer={kind='muon', others={lr='auto'}}", "training.optimizer.others.lr", ""),
    ("lr=1e-3", "lr", "training.optimizer.lr"),
    ("until=3 steps", "until", "training.until"),
    ("masking.rate=0.3", "masking", "objective.masking"),
    ("encoder=3", "encoder", "encoder.vocab=VALUE"),
    ("phases=64", "phases", "phases.0.length="),
    ("phases=[{lenght=64}]", "phases.0.lenght", "length"),
    ("zzz=1", "zzz", ""),
    ("encoder.depth=six", "encoder.depth", ""),
    ("encoder.depth=2.5", "encoder.depth", ""),
    ("encoder.depth=none", "encoder.depth", ""),
    ("encoder.dropout.hidden=1.5", "encoder.dropout.hidden", ""),
    ("encoder.heads=7", "encoder.heads", ""),
    ("training.until=3 parsecs", "training.until", ""),
    ("training.until.count=0", "training.until", ""),
    ("training.precision=fp8", "training.precision", ""),
    ("training.clip_norm=x", "training.clip_norm", ""),
    ("training.optimizer.betas=0.9", "training.optimizer.betas", ""),
    ("training.optimizer.betas=0.9,,0.98", "training.optimizer.betas", ""),
    ("phases.2.length=64", "phases.2", ""),
    ("phases.x=64", "phases.x", ""),
    ("phases.00.length=64", "phases.00", ""),
    (f"phases.{'9' * 5000}.length=64", f"phases.{'9' * 5000}", ""),
    ("phases=[{length=64}", "phases", ""),
    ("phases=[64]", "phases.0", ""),
    ("phases.1.length=64", "phases", ""),
    ("phases.0.length=100000", "phases.0.length", ""),
    ("phases.0.share=0.5", "phases", ""),
    ("objective.segments.cross=true", "objective.segments.cross", ""),
    ("batch=examples", "batch.n", ""),  # a member that is not made of its name alone
    ("seed", None, ""),
    (__file__, None, ""),
    ("=1", None, ""),
    ("a" * 5000, None, ""),  # longer than the name of a file can be
    ("encoder..depth=1", None, ""),
])  # fmt: skip
def test_mistakes_name_their_path_and_what_may_be_meant(override, where, near):
    with pytest.raises(ConfigError) as caught:
        load(override)
    assert caught.value.where == where
    assert near in caught.value.message("command")
    assert len(str(caught.value)) < 1000


def test_what_has_no_default_is_asked_for():
    with pytest.raises(ConfigError, match=r"^encoder: is missing: it must be a table"):
        configs.load(PretrainConfig)
    with pytest.raises(ConfigError, match=r"^encoder\.vocab: is missing: it must be a whole"):
        configs.load(PretrainConfig, overrides=["encoder.depth=2"])


@dataclass(frozen=True)
class Left:
    size: int
    kind: Literal["left"] = "left"


@dataclass(frozen=True)
class Right:
    kind: Literal["right"] = "right"


@dataclass(frozen=True)
class Holder:
    side: Left | Right
    path: Path = Path(".")
    names: tuple[str, ...] = ()
    table: dict[str, float] = dataclasses.field(default_factory=dict)


def halve(given: object) -> object:
    """A reader of texts that does not know the text which its own result prints."""
    if isinstance(given, str) and not given.isdecimal():
        raise ConfigError(f"{given!r} is no number")
    return Left(int(given) // 2) if isinstance(given, str) else given


@dataclass(frozen=True)
class Halved:
    side: Annotated[Left | Right, BeforeValidator(halve)]


def test_a_union_without_a_kind_asks_for_it():
    with pytest.raises(ConfigError, match=r"^side\.kind: is missing: it must be one of left"):
        configs.read(Holder, {"side": {"size": 3}})
    assert configs.read(Holder, {"side": {"size": 4}}, base=Holder(Left(3))) == Holder(Left(4))
    assert configs.read(Holder, {"side": "right"}, base=Holder(Left(3))) == Holder(Right())


def test_values_that_are_objects_already_stay():
    holder = Holder(Left(1), Path("a/b"), ("x", "y"), {"z": 1.0})
    tree = {"side": Left(1), "path": "a/b", "names": "x, y", "table": {"z": 1}}
    assert configs.read(Holder, tree) == holder
    assert configs.read(Holder, configs.to_dict(holder)) == holder


def test_a_member_that_cannot_be_read_from_its_own_text_is_written_as_a_table():
    holder = Halved(Left(6))
    assert configs.to_dict(holder) == {"side": {"size": 6, "kind": "left"}}
    for tree in ({"side": "12"}, configs.to_dict(holder)):
        assert configs.read(Halved, tree) == holder
    with pytest.raises(ConfigError, match=r"^side: 'left' is given|^side\.size: is missing"):
        configs.read(Halved, {"side": "left"})


def test_paths_begin_with_the_place_that_is_given():
    with pytest.raises(ConfigError, match=r"^model\.side\.size: 'x' is given"):
        configs.read(Holder, {"side": {"kind": "left", "size": "x"}}, where="model")
    with pytest.raises(ConfigError, match=r"^side\.kind: unknown kind"):
        configs.read(Holder, {"side": {"kind": ["left"]}})


@pytest.mark.parametrize(("content", "message"), [
    (None, "cannot be read: No such file"),
    (b"a = = 1", "is not TOML: .*line 1"),
    (b"\xff\xfe", "is not TOML"),
    (b"a = " + b"[" * 100_000, "is not TOML"),
], ids=["missing", "wrong", "binary", "deep"])  # fmt: skip
def test_files_that_are_no_toml_are_named(tmp_path, content, message):
    file = tmp_path / "run.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"run\.toml: {message}"):
        read_toml(file)


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    (tmp_path / "bom.toml").write_bytes(b"\xef\xbb\xbflength = 32\n")
    assert read_toml(tmp_path / "bom.toml") == {"length": 32}


def test_changeable_settings_are_marked_where_they_are_declared():
    @dataclass(frozen=True)
    class Inner:
        rate: float = 1.0
        report: int = field(default=10, metadata=configs.CHANGEABLE)
        until: int = field(default=3, metadata=configs.CHANGEABLE)

    @dataclass(frozen=True)
    class Outer:
        first: Inner = field(default=Inner(), metadata={"fixed": ("until",)})
        second: Inner | None = Inner()
        folder: str = field(default="a", metadata=configs.CHANGEABLE)

    assert configs.changeable_settings(Outer()) == {
        "first.report", "second.report", "second.until", "folder",
    }  # fmt: skip
    assert configs.changeable_settings(Outer(second=None)) == {"first.report", "folder"}


INF, NAN = math.inf, math.nan
RANGES = [
    ("[0, 1]", (0, 0.5, 1, None), "from 0 to 1", (-0.1, 1.1, -INF, INF, NAN)),
    ("[0, 1)", (0, 0.999, None), "at least 0 and below 1", (-1e-9, 1, 1.0, INF, NAN)),
    ("(0, 1]", (1e-9, 1), "above 0 and at most 1", (0, -0.0, 1.001, NAN)),
    ("(0, 1)", (0.5,), "above 0 and below 1", (0, 1, INF, NAN)),
    ("(0, 1000]", (1e-300, 1e3), "above 0 and at most 1000", (0.0, 1000.5)),
    ("[1, inf)", (1, 10**400, 1e300), "at least 1", (0, 0.99, -INF, NAN)),
    ("[1, inf)", (), "at least 1 and finite", (INF,)),
    ("(0, inf)", (5e-324,), "above 0", (0, -1, NAN)),
    ("(0, inf)", (), "above 0 and finite", (INF,)),
    ("(0, inf]", (0.1, INF, None), "above 0", (0, -INF, NAN)),
    ("[0, inf]", (0, INF), "at least 0", (-1, NAN)),
]


@pytest.mark.parametrize(("interval", "inside", "bounds", "outside"), RANGES)
def test_range_has_its_bounds(interval, inside, bounds, outside):
    for number in inside:
        require_range(interval, "encoder", width=number)
    for number in outside:
        with pytest.raises(ConfigError) as caught:
            require_range(interval, "encoder", depth=None, width=number, fix="Change it.")
        assert str(caught.value).startswith(f"encoder.width: must be {bounds}, not {number}")
        assert caught.value.fix == "Change it."


@pytest.mark.parametrize("number", [0, -3, 0.99, math.nan])
def test_the_first_number_below_is_named(number):
    with pytest.raises(ConfigError, match=rf"^encoder\.width: must be at least 1, not {number}$"):
        require_at_least(1, "encoder", depth=1, width=number, heads=0)


# The annotations are texts, as those of the package, of which nothing is imported for them.
@checked
def plain(
    folder: "str | Path", length: "int | None" = None, *, share: "float" = 0.5,
    flag: "bool" = False, device: "str" = "auto", rows: "list[str]" = [],  # noqa: B006
) -> "tuple[object, ...]":  # fmt: skip
    return folder, length, share, flag, device, rows


@pytest.mark.parametrize("arguments", [
    {"length": None, "share": 1, "flag": True},
    {"length": np.int64(3), "share": np.float32(0.1), "flag": np.True_},
    {"folder": Path("a"), "flag": 1},
    {"folder": np.str_("a"), "flag": 0},
    {"device": torch.device("cpu"), "rows": 3},
])  # fmt: skip
def test_arguments_of_their_kind_arrive_as_they_are(arguments):
    given = {"folder": "a", **arguments}
    expected = {"length": None, "share": 0.5, "flag": False, "device": "auto", "rows": []} | given
    assert plain(**given) == tuple(expected[name] for name in inspect.signature(plain).parameters)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"length": "3"}, "length: must be a whole number or None, not '3'"),
    ({"length": 3.0}, "length: must be a whole number or None, not 3.0"),
    ({"length": True}, "length: must be a whole number or None, not True"),
    ({"share": True}, "share: must be a number, not True"),
    ({"share": None}, "share: must be a number, not NoneType"),
    ({"flag": "no"}, "flag: must be True or False, not 'no'"),
    ({"flag": 2}, "flag: must be True or False, not 2"),
    ({"flag": None}, "flag: must be True or False, not NoneType"),
    ({"folder": 3}, "folder: must be a text or a path, not 3"),
    ({"folder": 3, "length": "3"}, "folder: must be a text or a path, not 3"),
])  # fmt: skip
def test_the_first_argument_of_another_kind_is_named(arguments, message):
    with pytest.raises(ConfigError) as refused:
        plain(**{"folder": "a", **arguments})
    assert str(refused.value) == message
