"""The paper's fine-tuning experiments, measured beside published (Devlin et al. 2018, sections 4 and 5.3).

A benchmark plans its experiments (`glue`, `squad`, `swag`, `ner`), `cost` says what they would take, `runner` runs them cell by
cell, `outcome` shows them beside the paper's rows (`published`).
"""
