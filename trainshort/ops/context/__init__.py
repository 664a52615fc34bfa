"""Context parallelism: attention over a sequence that is split into contiguous spans, one a rank.

parallel.py     the context manager, and attention inside it; state.py: which one is entered
transport.py    how ranks talk: torch.distributed, or all of them simulated in one process
call.py         what a rank is asked to compute, and what all ranks must agree on
levels.py       slopes, gates and times that go on from rank to rank
bounds.py       what keys of other ranks can weigh, from a few numbers a block
plan.py         which keys each rank needs of the others: the proof is in docs/context-parallel.md
exchange.py     what travels: keys and values, and their gradients
parts.py        the rows of a rank as attention calls
passes.py       forward and backward: fetch keys, compute, send gradients back
"""
