"""Ways to make a simulated user that the method is compared with, all behind `traitbasis serve` (see README.md)."""
