"""Running again: a model asked once more, with what was recorded or with one thing changed."""
