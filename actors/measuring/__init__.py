"""Measurements of a model on this machine: speed, profiles, calibration, search for drafts."""
