"""Launch, signals and shared decisions of the ranks."""
