"""Bytes that are hashed: their one form, their digests, and the keys beside them."""
