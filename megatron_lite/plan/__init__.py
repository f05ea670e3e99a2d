"""The arithmetic of a run without running it."""
