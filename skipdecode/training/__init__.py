"""Losses under skip schedules, LoRA modules, and SwiftKV's initial weights."""
