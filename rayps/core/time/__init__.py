"""The account of a job's time: parts, verdicts, waits. Pure."""
