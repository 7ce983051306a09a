"""What a job consists of and leaves: code, status, records. Pure, except for reading files."""
