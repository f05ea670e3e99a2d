"""What a run tells the person who watches it."""
