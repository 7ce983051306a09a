"""The parameter server: servers that hold the parameters of one job or of several, cut into segments.

`manager/` decides which server holds which segment of a job's *space*, and publishes this as a map. `server/` is one
server, which applies pushes to its segments. `client/` sends a worker's requests to the servers that the map names.
`tables/` holds sparse tables. `protocol/` defines the messages and values that all of them exchange. Servers can be
added, removed and lost during training, except where a fixed map replaces the manager. Li et al., "Scaling Distributed
Machine Learning with the Parameter Server", OSDI 2014.
"""
