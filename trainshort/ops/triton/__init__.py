"""Fused kernels for GPUs: see README.md beside this file for the mathematics."""
