"""Fine-tuning and distillation on Ray Train."""
