"""Families of encoders as data: presets, settings and weight names; no modules are defined here."""
