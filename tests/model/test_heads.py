"""Heads of whole sequences on causal encoders."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2Config, GPT2ForSequenceClassification

from bothways.core.batch import Batch, Layout
from bothways.hub.model_folder import load_model
from bothways.model.attention.patterns import Causal
from bothways.model.config import Dropouts, EncoderConfig, Own, Readout
from bothways.model.heads import LabelHead
from bothways.model.model import Model

CLS, SEP, GOOD, BAD = 1, 2, 3, 4


def texts(count: int, seed: int) -> tuple[Batch, Tensor]:
    """Texts of filler words with one "good" or "bad" word among them, and which it is."""
    generator = torch.Generator().manual_seed(seed)
    rows, labels = [], torch.randint(2, (count,), generator=generator)
    for label in labels:
        words = torch.randint(
            5, 20, (int(torch.randint(3, 9, (1,), generator=generator)),), generator=generator
        )
        words[int(torch.randint(len(words), (1,), generator=generator))] = GOOD if label else BAD
        rows.append(torch.cat([torch.tensor([CLS]), words, torch.tensor([SEP])]))
    ids = torch.cat(rows)
    return Batch(ids, torch.zeros_like(ids), Layout.of([len(row) for row in rows])), labels


@pytest.mark.parametrize("own", [None, Own()], ids=["pooler", "own"])
def test_a_causal_encoder_learns_from_its_last_token(own):
    """Its first token, [CLS], has seen nothing: read there, all texts would look alike."""
    torch.manual_seed(0)
    readout = Readout() if own is None else Readout(labels=own)
    config = EncoderConfig(
        20, 32, 2, 2, 64, patterns=(Causal(),), dropout=Dropouts(0.0, 0.0), readout=readout
    )
    model = Model(config, (LabelHead(2),)).train()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(60):
        batch, labels = texts(32, step)
        loss = F.cross_entropy(model.read("labels", batch), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    batch, labels = texts(200, 999)
    with torch.no_grad():
        right = (model.eval().read("labels", batch).argmax(1) == labels).float().mean()
    assert right > 0.95


def test_gpt_2_classifies_by_the_last_token_as_in_transformers(tmp_path):
    torch.manual_seed(0)
    theirs = GPT2ForSequenceClassification(
        GPT2Config(
            vocab_size=30, n_positions=16, n_embd=8, n_layer=2, n_head=2, num_labels=3,
            pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    ).eval()  # fmt: skip
    theirs.save_pretrained(tmp_path)
    encoder = load_model(tmp_path, heads=()).model.encoder
    lengths = [5, 9, 2]
    keep = torch.arange(9) < torch.tensor(lengths)[:, None]
    ids = torch.randint(3, 30, keep.shape) * keep
    layout = Layout.of(lengths)
    with torch.no_grad():
        x = encoder(Batch(ids[keep], torch.zeros(16, dtype=torch.int64), layout)).last
        found = theirs.score(x[layout.last_tokens])
        wanted = theirs(input_ids=ids, attention_mask=keep.long()).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
