"""Published agent benchmarks, driven unmodified with a served user (``traitbasis bench``)."""
