"""The command line: one table of commands, each imported when it is chosen."""
