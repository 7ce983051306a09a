"""The manager of a server group: pure functions decide which server holds each segment; a thread acts."""
