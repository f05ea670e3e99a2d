"""From text to packed rows: corpus, packing, blend, loader."""
