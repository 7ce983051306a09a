"""Secure aggregation: the sum of the clients' vectors, and no client's vector.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, figure 4; for many
clients with the sparse graph of Bell et al., "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead", CCS
2020. `service_stages.py` alone knows HTTP, and `release_record.py` a file; the rest is pure. `protocol.py` has the five
stages; `secure_turn.py` and `server_sum.py` are the two sides of them.
"""
