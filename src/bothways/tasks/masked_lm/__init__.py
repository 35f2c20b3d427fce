"""Tasks for the head of a masked language model; see `task`."""
