"""What runs inside a harness's own interpreter: standard library and the harness, no torch and no TraitBasis.

``python -m drivers.tau_trait`` with this folder's parent on PYTHONPATH (``traitbasis.harness.schedule.Worker`` does it).
"""
