"""Sparse tables: rows by 64-bit id, in segments. Pure: numpy, torch, files; no sockets, no threads of its own."""
