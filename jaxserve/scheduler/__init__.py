"""Which requests run, and where their K/V lives: queues and page accounting, host only."""
