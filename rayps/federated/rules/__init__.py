"""Rules that combine replies, and attacks on them."""
