"""Measuring: workloads, their replay, where time went, and what counts as goodput."""
