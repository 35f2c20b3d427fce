"""Classes that a model was not trained on, by entailment."""
