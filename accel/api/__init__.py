"""What the CLI calls, and so can you: one function a file."""
