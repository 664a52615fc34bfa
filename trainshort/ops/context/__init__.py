"""Context parallelism: attention over a sequence that is split into contiguous spans, one a rank.

call.py         what a rank is asked to compute, and what all ranks must agree on
transport.py    how ranks talk: torch.distributed, or all of them simulated in one process
bounds.py       what keys of other ranks can weigh, from a few numbers a block
plan.py         which keys each rank needs of the others: the proof is in docs/attention.md
parts.py        the rows of a rank that need keys of others, and those that don't, as attention calls
passes.py       forward and backward: fetch keys, compute, send gradients back
parallel.py     the context manager
"""
