"""A run as one HTML page that needs nothing else: ``milesbatch report``."""
