"""Customers who feel and react: the state of a simulated user is a fold over its conversation.

Three papers define such users: τ-Emotion-Bench (arXiv 2610.19560) has conditions and dissatisfaction, EIBench negative
emotion and relation, TEA-Bench (arXiv 2601.18700) support seekers that doubt what was made up. All model-free parts are
deterministic functions of the speaker turns.
"""
