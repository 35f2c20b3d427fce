"""The family of encoders as data: presets, settings and weight names. No `nn.Module` is defined here."""
