"""The mini benchmark: small real data, a small real CLIP and its experts, and the code that made them."""
