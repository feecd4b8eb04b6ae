"""Text and token ids: tokenizer, chat templates, detokenizing, stop strings. Host only."""
