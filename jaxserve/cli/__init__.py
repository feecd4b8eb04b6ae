"""The commands: arguments, terminal, exit codes. Nothing else reads flags or sets up logging."""
