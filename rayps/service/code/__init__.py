"""The code of jobs: packed, checked, stored."""
