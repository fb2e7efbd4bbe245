"""Part of milesbatch."""
