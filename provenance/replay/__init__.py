"""Recorded calls made again: load, restore, run, record; sets of them that hold outputs still, and what holds of a model."""
