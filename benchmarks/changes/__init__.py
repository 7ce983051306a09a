"""Measurements while workers, servers or hosts change or die."""
