"""``python -m provenance`` is the command ``provenance``."""

from provenance.cli.main import entry

if __name__ == "__main__":
    entry()
