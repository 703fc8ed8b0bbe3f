"""Tests, named after promises, lying as the rooms lie."""
