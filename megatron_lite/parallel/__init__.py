"""The grid of ranks, collectives with gradients, and the layers that use them."""
