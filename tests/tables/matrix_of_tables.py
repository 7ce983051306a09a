"""The laws of strategies with sparse tables, for test_ray_matrix.py."""

import pytest
from ray_laws import EXACT, WORKERS, Law, column, train
from test_hybrid import Films, both, uses_of
from test_hybrid import plain as plain_tables


class TablesInStep(Law):
    """Dense part and rows of tables are those of one process on the union of the batches."""

    def holds(self, cluster):
        (strategy,) = self.strategies
        result = train(cluster, Films(told=True, n=30), strategy, epochs=2)
        model, losses = plain_tables(Films(n=30), WORKERS)
        assert (both(result.model()) - both(model)).abs().max() < EXACT
        assert column(result, "loss") == pytest.approx(losses, abs=EXACT)


class TablesOutOfStep(Law):
    """Each row of the data is in two rows of a table once an epoch; the loss falls below that of the best constant."""

    def holds(self, cluster):
        (strategy,) = self.strategies
        work = Films(told=True, n=200, batch=10)
        result = train(cluster, work, strategy, epochs=5)
        assert uses_of(result) == 5 * 200 * 2
        assert result.metrics["loss"] < work.data().y.var()


LAWS = [TablesInStep("hybrid:servers=2,staleness=0"), TablesOutOfStep("hybrid:servers=2")]
