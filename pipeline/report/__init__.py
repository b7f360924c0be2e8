"""Figures, plots and the page of a run."""
