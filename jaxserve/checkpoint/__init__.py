"""Turns a path or a name into a model's configuration, tokenizer and weights."""
