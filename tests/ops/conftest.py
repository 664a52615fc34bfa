"""Threads that wait do not spin: workers of one test run share the cores, and each has threads of its own."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is first imported
