"""See `core.files`."""

from bothways.core.files import new_folder, replace_file

__all__ = ["new_folder", "replace_file"]
