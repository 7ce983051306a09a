"""A training loop that a user wrote: `rayps.run` and jobs of it, `rayps.wrap`, and what the loop calls.

world.py             what the user's function calls: world, params, log, save, restore
state.py             a state as tensors and JSON data, and the parts that ranks save
batches.py           `rayps.batches`: the worker's batches, read ahead
means.py             `rayps.mean`: a mean over the workers
export.py            the modules of a saved state as files
actor.py             one worker's process
watch.py             what workers print, log and save, as the driver collects it
log_points.py        the means over ranks of the numbers that `log` was given
driver.py            one run: start, recover, end
run.py               `rayps.run`
named.py             the function that "file.py:train_fn" names, and its parameters
wrap.py              `rayps.wrap`: an optimizer whose step is a round of a strategy
rounds.py            the thread that runs the rounds, in turns with the loop
view.py              the worker that a strategy's round uses
last_period.py       the end of a loop whose last period is incomplete
mean_gradient.py     the mean gradient, which is in `.grad` after backward
grad_scaler.py       what torch's GradScaler states about a gradient
same_objects.py      what the loop may have changed in the model and the optimizer
equal_buffers.py     rank 0's buffers for all workers
activity.py          what a worker is doing, for the error of a worker that waits for it
same_rows.py         the warning of workers that train on the same rows
remote_optimizer.py  what a loop may not do with an optimizer whose steps servers take
"""
