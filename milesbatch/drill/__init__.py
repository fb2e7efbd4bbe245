"""Breaking a small form of a recipe by plan, and proving that nothing was lost. The page behind it is ``docs/drill.md``."""
