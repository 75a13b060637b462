"""Contrastive pairs, one YAML file a trait; ``traitbasis.pairs`` reads them."""
