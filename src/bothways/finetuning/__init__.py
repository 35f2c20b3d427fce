"""Fine-tuning: settings, checks and preparation, the run, teachers, frozen features."""

from typing import Literal

FinetuneRecipe = Literal["modern", "paper", "electra", "few-shot"]
