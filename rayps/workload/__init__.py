"""Workloads: model, data, loss, optimizer and schedule, without machines, ranks or strategies."""
