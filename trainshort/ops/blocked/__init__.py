"""The blocked backend: attention in pure torch, linear in memory, on any device.

run.py          forward and backward of a problem, split among threads
passes.py       one pass: which kernel calls to make, and what to do with their results
cut.py          from windows to pieces: rectangles of queries and keys that one kernel call computes
calls.py        which pieces go into one kernel call
piece_kernels.py       the arithmetic of one piece
piece_bias.py   the bias of pieces, and its gradient
short.py        short causal rows: one kernel call
decode.py       one query a row: straight to the keys of its window
"""
