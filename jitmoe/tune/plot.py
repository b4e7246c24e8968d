"""Rows of sweeps as pictures."""
