"""Measures of simulated users, read off their dialogues (``traitbasis eval``)."""
