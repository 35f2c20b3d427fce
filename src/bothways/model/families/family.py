"""A family as data: weight names, classes of transformers, and settings of `config.json`.

A family names its settings for our fields, and the values that others must have. What needs more
than a name is a pair of functions, `read_more` and `write_more`.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bothways.core.config import reader as configs
from bothways.core.config.values import flatten
from bothways.core.errors import ConfigError, FolderError
from bothways.model.config import Activation, EncoderConfig
from bothways.model.families.weight_names import KeyTable, untied
from bothways.model.positions import Learned

SIZES = {
    "vocab": "vocab_size",
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "initial_range": "initializer_range",
}
"""Fields that nearly all families name alike."""
NUMBERS = SIZES | {
    "segments": "type_vocab_size",
    "norm_epsilon": "layer_norm_eps",
    "dropout.hidden": "hidden_dropout_prob",
    "dropout.attention": "attention_probs_dropout_prob",
}
"""Our fields, by dotted path, with the names that most families give them."""
UNSEGMENTED = {field: key for field, key in NUMBERS.items() if field != "segments"}
"""The same for families that read the number of segments with another default, or have none."""

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "relu": "relu", "silu": "silu",
    "swish": "silu",
}  # fmt: skip
FIXED = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
"""The only values that these settings may have."""

LARGEST = 2**31 - 1
"""The limit of every number in a configuration."""
MAX_LAYERS, MAX_SIZE = 10_000, 10**8
"""Limits of the layers and of every other size of a model, beyond any that exists."""

IGNORED = frozenset(
    """
    _attn_implementation _name_or_path attn_implementation name_or_path transformers_version
    model_type architectures id2label label2id num_labels problem_type dtype torch_dtype
    bos_token_id eos_token_id sep_token_id cls_token_id mask_token_id unk_token_id
    decoder_start_token_id forced_bos_token_id forced_eos_token_id
    output_attentions output_hidden_states output_past return_dict return_dict_in_generate
    use_return_dict output_scores torchscript use_bfloat16 tf_legacy_loss use_cache
    chunk_size_feed_forward gradient_checkpointing finetuning_task task_specific_params
    tokenizer_class prefix language name model_max_length max_length min_length do_sample
    early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids num_return_sequences remove_invalid_values exponential_decay_length_penalty
    suppress_tokens begin_suppress_tokens max_new_tokens
    directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers
    pooler_size_per_head pooler_type sentence_transformers sbert_ce_default_activation_function
    """.split()  # noqa: SIM905
)
"""Settings that change no output of any family, whatever their values."""
ALTERING = frozenset(
    """
    add_cross_attention alibi alibi_starting_size attn_logit_softcapping
    cross_attention_hidden_size final_logit_softcapping is_decoder is_encoder_decoder logit_scale
    num_key_value_heads parallel_attention_output parallel_attn partial_rotary_factor pruned_heads
    qk_layernorm qk_norm quantization_config relative_attention_num_buckets residual_scale rms_norm
    rope_parameters rope_scaling rope_theta rotary_emb_base rotary_emb_fraction
    rotary_emb_scale_base rotary_embedding sliding_window talking_head tie_encoder_decoder
    use_alibi use_qk_norm use_rms_norm use_rotary use_sliding_window
    """.split()  # noqa: SIM905
)
"""Settings that change a model's outputs unless they are off: null, false, 0 or empty."""
SHIFTED = "masked_next_token"
"""The setting of a model whose masked LM head predicts the token after the vector it reads.

transformers has no such class: it keeps the setting and computes the head's outputs in their own
places, so that the logits at a position are for the next one.
"""


@dataclass(frozen=True)
class ConfigRules:
    """How a family says what our configuration says.

    Attributes:
        defaults: the configuration that a `config.json` without settings means.
        numbers: its names of our fields that are numbers or flags, by dotted path.
        positions: its name for the longest input.
        activation: its name for the activation.
        activations: its names of activations; the first name of each is written.
        fixed: settings that must have this value or be absent.
        constant: settings that are always written.
        aliases: other names of its settings, that transformers accepts or that models have which
            were published before transformers had the family.
        ignored: settings of the family that change no output, or that only some models read.
        read_more: reads the other settings: (configuration so far, settings, file).
        write_more: returns the other settings of a configuration.
    """

    defaults: EncoderConfig
    numbers: Mapping[str, str] = field(default_factory=lambda: NUMBERS)
    positions: str = "max_position_embeddings"
    activation: str = "hidden_act"
    activations: Mapping[str, Activation] = field(default_factory=lambda: ACTIVATIONS)
    fixed: Mapping[str, Any] = field(default_factory=lambda: FIXED)
    constant: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    read_more: Callable[[EncoderConfig, Mapping[str, Any], str], EncoderConfig] = (
        lambda config, raw, where: config
    )
    write_more: Callable[[EncoderConfig], dict[str, Any]] = lambda config: {}

    def read(self, raw: Mapping[str, Any], location: str) -> EncoderConfig:
        """Return our configuration.

        Raises:
            FolderError: a setting has no counterpart here or is malformed.
        """
        return self.read_all(raw, location)[0]

    def read_all(
        self, raw: Mapping[str, Any], location: str
    ) -> tuple[EncoderConfig, dict[str, Any]]:
        """Return our configuration, and the settings that are unknown here; errors as `read`."""
        settings = _RecordedSettings(self._without_aliases(raw, location))
        config = self._read(settings, location)
        recognised = settings.read | IGNORED | self.aliases.keys() | self.ignored
        recognised |= self.constant.keys()
        # null stands for the default, which changes nothing.
        unknown = {key: raw[key] for key in raw if key not in recognised and raw[key] is not None}
        for key in unknown.keys() & ALTERING:
            if unknown.pop(key):
                message = f"{key} {raw[key]!r:.60} has no counterpart in this family"
                fix = "The outputs would differ from the model's: use its own code."
                raise FolderError(message, where=location, fix=fix)
        return config, unknown

    def _read(self, raw: Mapping[str, Any], location: str) -> EncoderConfig:
        for key, value in self.fixed.items():
            read_choice(raw, key, {value: value}, value, location)
        defaults = self.defaults
        values = {}
        for path, setting in self.numbers.items():
            default = _at(defaults, path)
            read: Callable[..., Any] = read_flag if isinstance(default, bool) else read_number
            values[path] = read(raw, setting, default, location)
        default = defaults.position.max_positions + _offset(defaults)
        positions = read_number(raw, self.positions, default, location) - _offset(defaults)
        name = first_name(self.activations, defaults.activation)
        activation = read_choice(raw, self.activation, self.activations, name, location)
        pad = raw.get("pad_token_id", defaults.pad)
        pad = None if pad is None else read_number(raw, "pad_token_id", defaults.pad or 0, location)
        if defaults.pad is None and pad is not None and not 0 <= pad < values["vocab"]:
            pad = None  # nothing reads the id in a family without padding
        tied = read_flag(
            raw, "tie_word_embeddings", defaults.readout.output == "embedding", location
        )
        readout = replace(defaults.readout, output="embedding" if tied else "own")
        defaults = replace(defaults, readout=readout, activation=activation, pad=None)
        values["position.max_positions"] = positions
        try:
            # The fields that change if these paths, of one or two names, have these values.
            changed: dict[str, Any] = {}
            for path, value in values.items():
                head, _, second = path.partition(".")
                group = changed.get(head, getattr(defaults, head))
                changed[head] = replace(group, **{second: value}) if second else value
            config = replace(defaults, **changed, pad=pad)
            check_size(config, "encoder")
            config = self.read_more(config, raw, location)
            shifted = read_flag(raw, SHIFTED, False, location)
            return replace(config, readout=replace(config.readout, shifted=shifted))
        except ConfigError as error:
            message = f"{error.where}: {error.what}"
            raise FolderError(message, where=location, fix=error.advice) from error

    def _without_aliases(self, raw: Mapping[str, Any], location: str) -> Mapping[str, Any]:
        """Return the settings under their first names."""
        renamed = {name: raw[alias] for alias, name in self.aliases.items() if alias in raw}
        for alias, name in self.aliases.items():
            if {alias, name} <= raw.keys() and raw[name] != raw[alias]:
                message = (
                    f"{name} is {raw[name]!r:.40}, and its other name {alias} is {raw[alias]!r:.40}"
                )
                raise FolderError(message, where=location, fix="Remove the one that is wrong.")
        return {**raw, **renamed}

    def write(self, config: EncoderConfig) -> dict[str, Any] | None:
        """Return the settings of a configuration, None if reading them gives another one."""
        settings, nearest = self._settings(config), self.nearest(config)
        return settings if nearest and nearest.canonical == config.canonical else None

    def nearest(self, config: EncoderConfig) -> EncoderConfig | None:
        """Return the configuration that the family's settings of another one give; None if none."""
        if "segments" in self.numbers and not config.segments:
            config = replace(config, segments=1)  # the family always has an embedding of segments
        try:
            return self.read(self._settings(config), "")
        except FolderError:
            return None

    def _settings(self, config: EncoderConfig) -> dict[str, Any]:
        return {
            **{key: _at(config, field) for field, key in self.numbers.items()},
            self.positions: config.position.max_positions + _offset(config),
            self.activation: first_name(self.activations, config.activation),
            "pad_token_id": config.pad,
            "tie_word_embeddings": config.readout.output == "embedding",
            **self.constant,
            **self.write_more(config),
            **({SHIFTED: True} if config.readout.shifted else {}),
        }


class _RecordedSettings(UserDict[str, Any]):
    """Settings that record which of them are read; the others are unknown to the family."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self.read = set[str]()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self.data[key]


def check_size(config: EncoderConfig, location: str) -> None:
    """Check that a model of this configuration can be built before its weights are looked at.

    Raises:
        ConfigError: there are more layers than `MAX_LAYERS`, or a size is beyond `MAX_SIZE`.
    """
    sizes = flatten(configs.to_dict(config)) | {"blocks": getattr(config, "blocks", 0)}
    for path, value in sizes.items():
        limit = MAX_LAYERS if path in ("depth", "blocks") else MAX_SIZE
        if isinstance(value, int) and value > limit:
            message = f"must be at most {limit:,}, not {value:,}"
            raise ConfigError(message, where=f"{location}.{path}")


def _at(config: EncoderConfig, path: str) -> Any:
    """Return the field at a dotted path; None where the configuration has no such field."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def _offset(config: EncoderConfig) -> int:
    return config.position.offset if isinstance(config.position, Learned) else 0


def read_number(raw: Mapping[str, Any], key: str, default: int | float, location: str) -> Any:
    """Return a setting that must be a number of the default's type."""
    value, kind = raw.get(key, default), type(default)
    if isinstance(value, bool) or not isinstance(value, (int, kind)) or not abs(value) <= LARGEST:
        expected = "a number" if kind is float else "a whole number"
        raise FolderError(f"{key} must be {expected}, not {value!r:.40}", where=location)
    return kind(value)


def read_flag(raw: Mapping[str, Any], key: str, default: bool, location: str) -> bool:
    """Return a setting that must be true or false."""
    value: bool = read_choice(raw, key, {True: True, False: False}, default, location)
    return value


def read_choice(
    raw: Mapping[str, Any], key: str, allowed: Mapping[Any, Any], default: Any, location: str
) -> Any:
    """Return the meaning of a setting that must be one of the keys of `allowed`."""
    value = raw.get(key, default)
    if not isinstance(value, str | bool) or value not in allowed:
        choices = ", ".join(map(repr, allowed))
        message = f"{key} {value!r:.80} has no counterpart here: it must be one of {choices}"
        raise FolderError(message, where=location)
    return allowed[value]


def first_name(names: Mapping[str, Any], value: object) -> str:
    """Return the first name of a value, "" without one."""
    return next((name for name, meaning in names.items() if meaning == value), "")


DROPOUTS = dict.fromkeys(("labels", "tags", "choice"), ("classifier_dropout", None))
"""Dropouts of heads in BERT."""


@dataclass(frozen=True)
class Architecture:
    """A class of transformers, or its stand-in for a model in our own format.

    Attributes:
        name: its name in `architectures` of `config.json`.
        heads: the heads that it has.
        bare: whether its files leave out the family's prefix.
        own: whether it is a stand-in.
        idle: those of its heads that its files hold and nothing reads.
    """

    name: str
    heads: frozenset[str]
    bare: bool = False
    own: bool = False
    idle: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Family:
    """A family of encoders in transformers.

    Attributes:
        model_type: its name in `config.json`.
        keys: its weight names.
        architectures: its classes, one for each set of heads; that of pre-training is the first.
        classless: sets of heads that no class has and that are published without naming one; the
            name is the class that opens the encoder in them.
        config_rules: its settings.
        vocabulary: the model of its tokenizers ("Unigram"), where only that distinguishes it from
            another family.
        dropouts: for heads with a dropout of their own, the setting and its default; None means
            the encoder's dropout.
        adapted: the weight names of a configuration, where they depend on it.
        seen: adds to a configuration what the names of a file's tensors show.
        otherwise: the class of presets that are not pre-trained as the first one.
        other_keys: weight names that are read and not written: of models that were published with
            code of their own before transformers had the family, and of transformers' modules
            where its files have others.
        other_types: the `model_type` of models that were published with code of their own.
    """

    model_type: str
    keys: KeyTable
    architectures: tuple[Architecture, ...]
    config_rules: ConfigRules
    classless: tuple[Architecture, ...] = ()
    vocabulary: str | None = None
    dropouts: Mapping[str, tuple[str, float | None]] = field(default_factory=lambda: DROPOUTS)
    adapted: Callable[[EncoderConfig], KeyTable] | None = None
    seen: Callable[[EncoderConfig, Collection[str]], EncoderConfig] = lambda config, names: config
    otherwise: Mapping[str, str] = field(default_factory=dict)
    other_keys: tuple[KeyTable, ...] = ()
    other_types: tuple[str, ...] = ()

    def keys_for(self, config: EncoderConfig, names: Collection[str] = ()) -> KeyTable:
        """Return the weight names of a model of this configuration.

        Args:
            config: the configuration.
            names: the tensors of a file; the weight names that it has most of are returned.
        """
        family_table = self.keys if self.adapted is None else self.adapted(config)
        candidate = max(
            (family_table, *self.other_keys), key=lambda candidate: sum(map(candidate.knows, names))
        )
        return untied(candidate) if config.readout.output == "own" else candidate

    def architecture_named(self, names: Iterable[str]) -> Architecture | None:
        """Return the first of these classes that the family has."""
        candidates = {architecture.name: architecture for architecture in self.architectures}
        return next((candidates[name] for name in names if name in candidates), None)

    def pretrained(self, preset: str) -> Architecture:
        """Return the class that a preset is pre-trained as."""
        return self.architecture_named([self.otherwise.get(preset, "")]) or self.architectures[0]

    def architecture_with(self, heads: Iterable[str]) -> Architecture | None:
        """Return the class with exactly these heads; idle ones may be missing."""
        kinds = frozenset(heads)
        candidates = (*self.architectures, *self.classless)
        matching = (a for a in candidates if a.heads - a.idle <= kinds <= a.heads)
        return next(matching, None)
