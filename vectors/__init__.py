"""Trait vectors and basis of the embedded default model, as ``make vectors`` writes them."""
