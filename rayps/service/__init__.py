"""The job service without its HTTP interface: store, scheduler, server groups, the Ray that runs jobs. No torch."""
