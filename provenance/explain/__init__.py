"""Which difference did it: pure functions from facts to facts. No I/O, no clock, no torch."""
