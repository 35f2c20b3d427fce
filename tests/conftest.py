"""What holds for all tests."""

from hypothesis import settings

# A slow or busy machine is no failure, and the same commit passes or fails alike everywhere.
settings.register_profile("repeatable", deadline=None, derandomize=True)
# New examples at every run, to find what no one has met yet: pytest -m hypothesis --hypothesis-profile=fresh
settings.register_profile("fresh", deadline=None, derandomize=False, print_blob=True)
settings.load_profile("repeatable")
