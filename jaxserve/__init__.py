"""jaxserve: a measured serving runtime for language models on one node, in Python on JAX."""

__version__ = "0.1.0"
