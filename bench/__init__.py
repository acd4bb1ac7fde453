"""Measurements, and the figures that are drawn from them: `python -m bench`."""
