"""Models written as if for one process; every parallel choice is made in a constructor."""
