"""Fine-tuning: settings, checks and preparation, the run, teachers, frozen features."""
