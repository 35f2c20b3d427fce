"""Published experiments, run again and compared with the published results."""
