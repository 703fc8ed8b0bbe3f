"""The corridor between the two wings: append-only segments that survive the death of the process."""
