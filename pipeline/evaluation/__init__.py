"""Quality: scores, sweeps, calibration."""
