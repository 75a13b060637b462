"""What runs inside a harness's own interpreter: standard library and the harness, no torch and no TraitBasis.

Started by ``traitbasis.harness.schedule.command_of``, as ``drivers.tau_trait`` and ``drivers.tau2``.
"""
