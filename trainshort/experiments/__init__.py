"""Experiments: many runs that differ in one thing, side by side. Importing this package does not import torch."""
