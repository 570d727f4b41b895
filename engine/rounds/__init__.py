"""What executes a step, and what it takes."""
