"""The readers of the catalogue's fields. They look and do not touch: nothing is imported, initialised or set."""
