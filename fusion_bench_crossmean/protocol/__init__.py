"""Compares merging methods under one protocol: shared draws, scales chosen on validation rows, cells that are kept."""
