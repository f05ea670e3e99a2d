"""The order of micro-batches over pipeline ranks, and the moving of activations between them. Knows no model."""
