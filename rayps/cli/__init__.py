"""The command line `rayps`: one module for each group of commands."""
