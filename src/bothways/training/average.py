"""The exponential moving average of a module's weights, for evaluation and the saved model.

After update t the average is Σ dᵗ⁻ⁱ wᵢ / Σ dᵗ⁻ⁱ over the updates i ≤ t, with wᵢ the weights after
update i and d the decay: the weights at the start have no share. It follows from

    average ← average + (1 − d)/(1 − dᵗ) · (wₜ − average)

The average is a submodule of the module that is trained: checkpoints hold it, and a resumed run
continues it.

Source: Polyak & Juditsky 1992; the correction for the start is that of Kingma & Ba 2014, section 3.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from bothways.core.training_module import TrainingModule
from bothways.training.parallel import give_up_gathered, own_parts

NAME = "average"
"""The name of the submodule."""


class Average(nn.Module):
    """The average of a training module's trained weights; it becomes a submodule of the module.

    Args:
        decay: d, above 0 and below 1.
    """

    def __init__(self, training_module: TrainingModule, decay: float) -> None:
        super().__init__()
        self.decay = decay
        trained = [(name, p) for name, p in training_module.trained_parameters() if p.requires_grad]
        self._weights: list[Tensor] = [
            p for _, p in trained
        ]  # in a list, so that they are not its own
        for name, p in trained:
            self.register_buffer(name.replace(".", "/"), p.detach().clone())
        training_module.add_module(NAME, self)
        self._training_module = (training_module,)  # in a tuple, so that it is no submodule

    @torch.no_grad()
    def update(self, steps: int) -> None:
        """Add the weights after an update to the average.

        Args:
            steps: the number of updates, this one included.
        """
        share = (1 - self.decay) / (1 - self.decay**steps)
        torch._foreach_lerp_(own_parts(self.buffers()), own_parts(self._weights), share)

    @torch.no_grad()
    def apply_to_weights(self) -> list[Tensor]:
        """Replace the weights by their average; return those before, of this rank."""
        previous = [weight.detach().clone() for weight in own_parts(self._weights)]
        self._set(own_parts(self.buffers()))
        return previous

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Use the average as the weights, such as in an evaluation."""
        previous = self.apply_to_weights()
        try:
            yield
        finally:
            self._set(previous)

    @torch.no_grad()
    def _set(self, values: list[Tensor]) -> None:
        torch._foreach_copy_(own_parts(self._weights), values)
        give_up_gathered(self._training_module[0])


def use_average(training_module: TrainingModule) -> None:
    """Replace the weights of a training module by their average, if it has one."""
    average = getattr(training_module, NAME, None)
    if isinstance(average, Average):
        average.apply_to_weights()


@contextlib.contextmanager
def averaged_weights(training_module: TrainingModule) -> Iterator[None]:
    """Use the average of the weights, if a training module has one, such as to save it."""
    average = getattr(training_module, NAME, None)
    with average.applied() if isinstance(average, Average) else contextlib.nullcontext():
        yield
