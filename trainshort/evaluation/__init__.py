"""Perplexity at any length: windows over the same scored tokens, in chunks through the cache, as records in a file.

`trainshort.evaluation.evaluate.evaluate` is the function to call. Importing this package does not import torch.
"""
