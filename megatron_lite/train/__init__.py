"""One optimizer step, the loop around it, and the stages of a recipe."""
