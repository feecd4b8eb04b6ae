"""Attention of ragged queries over a paged KV pool."""

from jaxserve.kernels.paged_attention.api import Impl, paged_attention

__all__ = ["Impl", "paged_attention"]
