"""Pre-training: settings and recipes, the run, evaluation on held-out documents."""
