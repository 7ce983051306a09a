"""The manager of a server group: pure functions decide which server holds each segment; one thread carries it out."""
