"""Files of a model in and out: hub ids, Hugging Face folders, GGUF files, tokenizers, LoRA adapters."""
