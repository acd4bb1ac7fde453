"""Measurements: cases, runners, records. Each writes JSON lines that later runs go on from."""
