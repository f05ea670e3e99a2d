"""Which pieces a rank owns; saving, loading and resharding them."""
