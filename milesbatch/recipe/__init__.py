"""Recipes: models, loading with ``extends`` and ``--set``, freezing, the generated page. Imports without torch."""
