"""What a user calls: one file an operation, read top to bottom together with its kernel file."""
