"""Sparse tables: rows addressed by 64-bit ids, cut into segments. Uses numpy, torch and files; opens no sockets."""
