"""Analysis of a model's predictions: errors, confusions and calibration, example by example."""
