"""Keeping outputs steady: what must hold is written down and compared, not hoped for."""
