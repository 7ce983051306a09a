"""Sparse tables: rows by 64-bit id, in segments. numpy, torch and files; no sockets."""
