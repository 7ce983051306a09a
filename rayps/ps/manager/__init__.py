"""The manager of a server group: pure functions decide which server holds each segment, and a thread acts on this."""
