"""Charts and pages of HTML without scripts from other hosts."""
