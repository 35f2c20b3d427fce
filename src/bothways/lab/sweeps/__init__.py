"""Many runs: seeds, grids, searches, and tests of significance."""
