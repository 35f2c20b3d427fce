"""What transformers' Trainer does with a task, one file per kind of task; `benchmarks/finetuning.py` runs them."""
