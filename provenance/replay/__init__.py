"""Recorded calls made again, sets of them that hold outputs still, and probes of what holds of a model."""
