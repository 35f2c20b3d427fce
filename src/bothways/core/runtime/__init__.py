"""The machine: devices, precision, the allocator, measured thresholds."""
