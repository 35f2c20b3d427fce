"""Small configurations of every family in transformers' terms, their options at random."""

import random

TANH = {"longformer": "gelu_pytorch_tanh", "big_bird": "gelu_new"}
"""Of the names of one function, the one that is written."""


def draw_settings(model_type: str, seed: int, dropout: float = 0.0) -> dict[str, object]:
    """Of seeds that follow each other one has an output layer of its own, one that of the embedding, whatever else is drawn."""
    return {**_draw(model_type, random.Random(seed), dropout), "tie_word_embeddings": seed % 2 == 0}


def _draw(model_type: str, rng: random.Random, dropout: float) -> dict[str, object]:
    if model_type in TANH:
        return draw_long(model_type, rng, dropout)
    if model_type in ("deberta", "deberta-v2"):
        return draw_deberta(model_type, rng, dropout)
    heads, most = rng.choice((1, 2, 4)), rng.randint(20, 30)
    width, depth = heads * rng.choice((5, 8)), rng.randint(1, 4)
    activation = rng.choice(("gelu", "gelu_new", "relu", "silu"))
    if model_type == "distilbert":
        return {
            "vocab_size": 50, "dim": width, "n_layers": depth, "n_heads": heads, "hidden_dim": rng.randint(8, 40),
            "max_position_embeddings": most, "activation": activation, "dropout": dropout, "attention_dropout": dropout,
            "qa_dropout": dropout, "seq_classif_dropout": dropout,
        }  # fmt: skip
    if model_type in ("gpt2", "openai-gpt"):
        name, inner = (
            ("activation_function", {"n_inner": rng.randint(8, 40)})
            if model_type == "gpt2"
            else ("afn", {})
        )
        return {
            "vocab_size": 50, "n_embd": width, "n_layer": depth, "n_head": heads, "n_positions": most,
            "layer_norm_epsilon": rng.choice((1e-5, 1e-2)), "resid_pdrop": dropout, "embd_pdrop": dropout / 2,
            "attn_pdrop": dropout, "bos_token_id": 1, "eos_token_id": 2, name: rng.choice(("gelu", "relu", "silu")), **inner,
        }  # fmt: skip
    if model_type == "modernbert":
        kinds = ("full_attention", "sliding_attention")
        layers = [*rng.sample(kinds, 2), *rng.choices(kinds, k=depth - 1)]
        return {
            "vocab_size": 50, "hidden_size": heads * rng.choice((6, 8)), "num_hidden_layers": len(layers),
            "num_attention_heads": heads, "intermediate_size": rng.randint(8, 40), "max_position_embeddings": most,
            "hidden_activation": rng.choice(("gelu", "gelu_pytorch_tanh", "relu", "silu")),
            "classifier_activation": rng.choice(("gelu", "relu")), "norm_eps": rng.choice((1e-5, 1e-2)),
            "layer_types": layers, "local_attention": 2 * rng.randint(0, 4),
            "rope_parameters": {kind: {"rope_theta": rng.choice((5.0, 1e4))} for kind in kinds},
            "classifier_pooling": rng.choice(("cls", "mean")), "attention_dropout": dropout, "classifier_dropout": dropout,
            "embedding_dropout": dropout / 2, "mlp_dropout": dropout / 3,
            **{f"{name}_bias": rng.random() < 0.5 for name in ("attention", "mlp", "norm", "decoder", "classifier")},
            **{f"{name}_token_id": at for name, at in (("pad", 3), ("cls", 1), ("bos", 1), ("sep", 2), ("eos", 2))},
        }  # fmt: skip
    if model_type == "eurobert":
        return {
            "vocab_size": 50, "hidden_size": heads * rng.choice((6, 8)), "num_hidden_layers": depth, "num_attention_heads": heads,
            "intermediate_size": rng.randint(8, 40), "max_position_embeddings": most, "hidden_act": activation,
            "num_key_value_heads": rng.choice([n for n in (1, 2, 4) if heads % n == 0]), "pad_token_id": rng.choice((0, 3)),
            "bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": rng.choice((1e-5, 1e-2)), "attention_dropout": dropout,
            "attention_bias": rng.random() < 0.5, "mlp_bias": rng.random() < 0.5,
            "classifier_pooling": rng.choice(("bos", "mean", "late")),
            "rope_parameters": {"rope_theta": rng.choice((5.0, 1e4)), "rope_type": "default"},
        }  # fmt: skip
    settings: dict[str, object] = {
        "vocab_size": 50, "hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": heads,
        "intermediate_size": rng.randint(8, 40), "max_position_embeddings": most, "hidden_act": activation,
        "type_vocab_size": rng.randint(1, 2), "layer_norm_eps": rng.choice((1e-12, 1e-5, 1e-2)),
        "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout,
    }  # fmt: skip
    if model_type == "albert":
        settings |= {
            "embedding_size": rng.choice((6, width)), "num_hidden_groups": rng.randint(1, depth),
            "inner_group_num": rng.randint(1, 3), "classifier_dropout_prob": dropout,
        }  # fmt: skip
    if model_type == "ernie":
        settings |= {"use_task_id": rng.random() < 0.7}
        settings |= {"task_type_vocab_size": rng.randint(1, 4)} if settings["use_task_id"] else {}
    if model_type == "electra":
        settings |= {"embedding_size": rng.choice((6, width)), "summary_last_dropout": dropout}
    if model_type in ("nomic_bert", "gte"):
        even = heads * rng.choice((6, 8))
        scaled = {"rope_type": "linear", "factor": 1.5} if rng.random() < 0.5 else {}
        settings |= {
            "hidden_size": even, "pad_token_id": rng.choice((0, 1)),
            "type_vocab_size": rng.randint(1 if model_type == "nomic_bert" else 0, 2),
            "rope_parameters": {"rope_theta": rng.choice((5.0, 1e4)), "rope_type": "default", **scaled},
        }  # fmt: skip
    if model_type == "mpnet":
        del settings["type_vocab_size"]
        settings |= {"pad_token_id": 1}
    if "roberta" in model_type or model_type == "camembert":
        settings |= {"pad_token_id": rng.choice((0, 1, 3))}
    return settings


def draw_deberta(model_type: str, rng: random.Random, dropout: float) -> dict[str, object]:
    """Disentangled attention with all its options, or none of it, which is transformers' default."""
    heads, most, relative = rng.choice((1, 2, 4)), rng.randint(20, 30), rng.random() < 0.8
    width = heads * rng.choice((5, 8))
    settings: dict[str, object] = {
        "vocab_size": 50, "hidden_size": width, "num_hidden_layers": rng.randint(1, 3), "num_attention_heads": heads,
        "intermediate_size": rng.randint(8, 40), "max_position_embeddings": most, "layer_norm_eps": rng.choice((1e-7, 1e-2)),
        "hidden_act": rng.choice(("gelu", "gelu_new", "relu")), "type_vocab_size": rng.randint(0, 2),
        "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout, "pooler_dropout": dropout / 2,
        "cls_dropout": dropout, "pooler_hidden_act": rng.choice(("gelu", "tanh", "relu")),
        "relative_attention": relative, "position_biased_input": not relative or rng.random() < 0.4,
        "pos_att_type": rng.choice((["c2p"], ["p2c"], ["c2p", "p2c"], ["p2c", "c2p"])) if relative else None,
        "max_relative_positions": rng.choice((-1, 4, 9)) if relative else -1,
        **({"embedding_size": 6} if rng.random() < 0.5 else {}),
    }  # fmt: skip
    if model_type == "deberta-v2" and relative:
        settings |= {
            "position_buckets": rng.choice((-1, 4, 5)), "share_att_key": rng.random() < 0.5,
            "norm_rel_ebd": rng.choice(("none", "layer_norm")),
        }  # fmt: skip
        if rng.random() < 0.6:
            size, act = rng.choice((1, 3, 5)), rng.choice(("tanh", "gelu"))
            settings |= {
                "conv_kernel_size": size,
                "conv_groups": rng.choice((1, heads)),
                "conv_act": act,
            }
    return settings


def draw_long(model_type: str, rng: random.Random, dropout: float) -> dict[str, object]:
    """Longer inputs, windows that divide them all, or blocks."""
    heads, depth = rng.choice((1, 2, 4)), rng.randint(1, 3)
    settings: dict[str, object] = {
        "vocab_size": 50, "hidden_size": heads * rng.choice((5, 8)), "num_hidden_layers": depth, "num_attention_heads": heads,
        "intermediate_size": rng.randint(8, 40), "max_position_embeddings": rng.randint(66, 90),
        "type_vocab_size": rng.randint(1, 2),
        "hidden_act": rng.choice(("gelu", TANH[model_type], "relu", "silu")), "layer_norm_eps": rng.choice((1e-12, 1e-5, 1e-2)),
        "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout, "bos_token_id": 1, "eos_token_id": 2,
        "sep_token_id": 3, "pad_token_id": rng.choice((0, 1, 3)),
    }  # fmt: skip
    if model_type == "longformer":
        half = rng.choice((2, 3, 5))  # theirs reads only lengths that all windows divide
        windows = [2 * half * rng.choice((1, 4)) for _ in range(depth)]
        return settings | {"attention_window": rng.choice((2 * half, windows))}
    sparse = {
        "attention_type": "block_sparse",
        "block_size": rng.choice((2, 4)),
        "num_random_blocks": rng.randint(1, 3),
    }
    return settings | rng.choice((sparse, sparse, sparse, {"attention_type": "original_full"})) | {
        "use_bias": rng.random() < 0.5, "rescale_embeddings": rng.random() < 0.5,
    }  # fmt: skip
