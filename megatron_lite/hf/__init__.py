"""Hugging Face folders: their configuration, their weights, and the way between them and checkpoints."""
