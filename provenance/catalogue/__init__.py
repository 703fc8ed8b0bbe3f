"""What every field is: pure data, no I/O. The readers stand in `fingerprint`, the rules in `explain`."""
