"""Flat buffers, the ZeRO-1 optimizer and learning-rate schedules."""
