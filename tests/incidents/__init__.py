"""Public reports of runs that parted: what decides each, where it is recorded, and whether the explainer finds it."""
