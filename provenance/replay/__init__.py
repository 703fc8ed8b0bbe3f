"""Recorded calls made again: load, restore, run, record; and sets of them that hold outputs still."""
