/* The debiased exponential moving average (the bias correction of Kingma & Ba 2015, section 3). */

/**
 * Smooth values in order. A weight of n counts a value as n equal values in a row, so buckets of many rounds smooth as
 * their rounds would. Null and NaN stay gaps and do not touch the average.
 */
export function ema(values: ArrayLike<number | null>, beta: number, weights?: ArrayLike<number>): (number | null)[] {
  const out: (number | null)[] = new Array(values.length);
  let average = 0;
  let kept = 1; // beta ** (values seen): what is still missing from the average's weight
  for (let i = 0; i < values.length; i++) {
    const value = values[i];
    if (value === null || value === undefined || !Number.isFinite(value)) {
      out[i] = null;
      continue;
    }
    const decay = beta ** (weights?.[i] ?? 1);
    average = decay * average + (1 - decay) * value;
    kept *= decay;
    out[i] = kept < 1 ? average / (1 - kept) : value;
  }
  return out;
}
