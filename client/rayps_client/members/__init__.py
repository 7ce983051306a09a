"""Membership of institutions: certificates of a federation's own authority, signed requests, and data-use statements.

See docs/institutions.md.
"""
