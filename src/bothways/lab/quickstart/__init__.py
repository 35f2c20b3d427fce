"""A first run on the documentation in a Python installation, compared with random weights."""
