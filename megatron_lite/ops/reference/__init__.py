"""Plain torch: the truth every faster kernel is compared with."""
