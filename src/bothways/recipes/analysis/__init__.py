"""What a model does well and badly: an analysis of its predictions, and the report of it."""
