"""The tokenizer of a worker: that of `skipdecode.tokenizer`, under the name that it had here."""

from skipdecode.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer

__all__ = ["Tokenizer", "TokenizerConfig", "train_tokenizer"]
