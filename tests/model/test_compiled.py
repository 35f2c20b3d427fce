"""Compiled blocks: what the others give, forward and backward, and no trace for another number of tokens."""

import copy
import dataclasses
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from bothways.core.batch import Batch, Layout
from bothways.core.errors import ConfigError
from bothways.finetuning.config import finetune_adam
from bothways.model import block
from bothways.model.attention import dispatch
from bothways.model.attention.mask import RotaryTables
from bothways.model.attention.patterns import Window
from bothways.model.config import Dropouts, Gated
from bothways.model.kernels import dropout
from bothways.model.model import Encoder, recorded_projections
from bothways.training.run import compute_as
from small_models import SHAPES, batch_for

# The tracer looks at it of every input.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")
BATCHES = ([5, 6], [30], [4, 4, 4, 4])
NAMES = (
    "bert-base-chinese", "albert-xxlarge-v2", "deberta-v2-xxlarge", "modernbert-large", "gpt2-xl",
)  # fmt: skip
DIFFERENT = ("deberta-v2-xxlarge", "modernbert-large")
"""The blocks of the others are made of parts of these, and of those computed again below."""
TRACED: tuple[tuple[Any, str], ...] = (
    (block.Block, "rest"), (block.FeedForward, "forward"), (block.FeedForward, "_down"), (block, "activate"),
    (block, "add_norm"), (dropout, "dropout"), (dropout, "_has_kernel"), (dropout.Dropout, "forward"),
)  # fmt: skip
PACKED: tuple[tuple[Any, str], ...] = (
    *TRACED, (block.Block, "compute"), (block.Attention, "forward"), (block.Attention, "_project"),
    (block.Attention, "_project_global"), (block.Attention, "_qkv"), (block, "attend"), (block, "on_round_rows"),
    (block, "selected_rows"), (dispatch, "attend_packed"), (RotaryTables, "__call__"),
)  # fmt: skip
COMPILED = dataclasses.replace(finetune_adam(), compiled=True)


@pytest.fixture
def whole(monkeypatch) -> CompileCounterWithBackend:
    """Whole blocks around the kernel for packed sequences, on a device without values."""
    torch._dynamo.reset()
    for owner, name in PACKED:
        monkeypatch.setattr(owner, name, inspect.unwrap(getattr(owner, name)))
    monkeypatch.setattr(dispatch, "has_varlen", lambda device: True)
    counter = CompileCounterWithBackend("aot_eager")
    program = torch.compile(block.Block.compute, dynamic=True, fullgraph=True, backend=counter)

    def compiled(method: object) -> Any:
        assert method is block.Block.compute
        return program

    monkeypatch.setattr(block, "compiled", compiled)
    return counter


@pytest.fixture
def counter(monkeypatch) -> CompileCounterWithBackend:
    """What would be given to the compiler is run as it is, forward and backward, and counted."""
    torch._dynamo.reset()
    for owner, name in TRACED:  # without the checks of types and shapes that tests run with
        monkeypatch.setattr(owner, name, inspect.unwrap(getattr(owner, name)))
    # What is compiled is made of torch's operators.
    monkeypatch.setattr(dropout, "runs_on", lambda device: False)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block.Block.rest, dynamic=True, fullgraph=True, backend=counter)
    monkeypatch.setattr(block, "compiled", lambda method: compiled)
    return counter


def encoder_of(name: str) -> Encoder:
    """Without dropout, whose random numbers a compiler does not trace on a CPU."""
    config = SHAPES[name]
    mlp = Gated() if isinstance(config.mlp, Gated) else config.mlp
    return Encoder(dataclasses.replace(config, depth=2, dropout=Dropouts(0.0, 0.0), mlp=mlp))


def trained(
    encoder: Encoder, lengths: list[int], compiled: bool, only: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    for part in encoder.modules():
        if isinstance(part, block.Block):
            part.compiled = compiled
    encoder.zero_grad()
    found = encoder(batch_for(encoder.config, lengths), only=only).last
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(7))
    (found * weights).sum().backward()
    return found.detach(), {
        name: x.grad for name, x in encoder.named_parameters() if x.grad is not None
    }


@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        *(
            pytest.param(name, False, marks=() if name in DIFFERENT else pytest.mark.slow)
            for name in NAMES
        ),
        (NAMES[0], True),
    ],
)
def test_compiled_is_what_it_is_without(name, recompute, counter):
    encoder = encoder_of(name).train()
    encoder.recompute = recompute
    traces = []
    for lengths in BATCHES:
        for only in (None, torch.tensor([0, sum(lengths) - 1])):
            usual, compiled = (
                trained(encoder, lengths, compiled, only) for compiled in (False, True)
            )
            torch.testing.assert_close(compiled, usual, rtol=0, atol=1e-6)
        traces.append(counter.frame_count)
    assert 0 < traces[0] == traces[-1]


@pytest.mark.parametrize(
    "config",
    [
        # A window, rotary positions and LayerNorms after each part; each trace takes seconds.
        dataclasses.replace(SHAPES["window"], patterns=(Window(2),)),
        pytest.param(SHAPES["bert-base-chinese"], marks=pytest.mark.slow),
        pytest.param(SHAPES["modernbert-large"], marks=pytest.mark.slow),
    ],
    ids=["window", "bert", "modernbert"],
)
def test_a_whole_block_is_one_program_for_any_number_of_tokens(config, whole):
    config = dataclasses.replace(config, depth=3, dropout=Dropouts(0.1, 0.1))
    encoder, traces = Encoder(config).to("meta", torch.bfloat16).train(), []
    for part in encoder.blocks:
        part.compiled = True
    for lengths in BATCHES:
        ids = torch.zeros(sum(lengths), dtype=torch.int64, device="meta")
        for only in (None, ids[:2]):
            batch = Batch(ids, ids, Layout.of(lengths).to(ids.device))
            encoder(batch, only=only).last.sum().backward()
        traces.append(whole.frame_count)
    assert 0 < traces[0] == traces[-1] <= 6
    # Hooks are called: no whole program.
    with recorded_projections(encoder, {1}) as found, pytest.raises(AssertionError):
        encoder(batch)
    assert 1 in found


def test_a_copy_computes_with_weights_of_its_own(counter):
    encoder = encoder_of(NAMES[0])
    before = trained(encoder, [5, 6], True, None)[0]
    other = copy.deepcopy(encoder)
    with torch.no_grad():
        other.blocks[1].attention.out.weight.zero_()
    assert torch.equal(trained(encoder, [5, 6], True, None)[0], before)
    found = trained(other, [5, 6], True, None)[0]
    assert torch.equal(found, trained(other, [5, 6], False, None)[0])
    assert not torch.equal(found, before)


def test_a_gpu_alone_is_given_compiled_blocks():
    encoder = encoder_of(NAMES[0])
    message = r"training\.compiled: is for the blocks of a Transformer on a GPU, not .* on cpu"
    with pytest.raises(ConfigError, match=message):
        compute_as(encoder, COMPILED, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"training\.graphs: is for CUDA graphs, not for cpu"):
        compute_as(encoder, dataclasses.replace(finetune_adam(), graphs=True), torch.device("cpu"))
    compute_as(encoder, COMPILED, torch.device("cuda"))
    assert all(part.compiled for part in encoder.modules() if isinstance(part, block.Block))
    compute_as(encoder, finetune_adam(), torch.device("cuda"))
    assert not any(part.compiled for part in encoder.modules() if isinstance(part, block.Block))
