"""Comparisons of speed on this machine, and timed pre-training to a fixed loss."""
