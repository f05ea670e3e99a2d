"""What a run is: typed recipes, checked on a machine without torch."""
