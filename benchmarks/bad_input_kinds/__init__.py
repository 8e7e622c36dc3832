"""Kinds of bad inputs for `bad_inputs.py`, and the small networks that they are made from."""
