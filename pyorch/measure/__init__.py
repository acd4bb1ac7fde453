"""Measurements: cases, runners and records. Each writes JSON lines, which later runs continue."""
