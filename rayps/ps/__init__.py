"""The elastic server group: servers that several jobs share, and that can be added, removed and lost during training.

A *manager* knows which server holds which segment (`manager/`); *hosts*, the servers, hold segments of several jobs'
*spaces* (`server/`); a worker's *client* keeps a copy of the map (`client/`). What all of them know lies here. Li et
al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.
"""
