/* A metric of the user's own over the run, in training and in evaluations. */
import { useSignal } from "@preact/signals";
import { useMemo } from "preact/hooks";
import type uPlot from "uplot";
import { color } from "../clock";
import type { Feed } from "../feed";
import { count, metric } from "../lib/format";
import { mainMetric, metricData, metricNames } from "../lib/plot";
import { metricBound } from "../lib/strategy";
import { put, route } from "../route";
import { Card } from "./bits";
import { axis, Chart, cursor } from "./chart";
import { before, lastKnown, Loading, metricTick, Readout } from "./curves";

/** One metric of a job at a time; nothing if it has none beside those of the loss chart. */
export function MetricsCard({ feed }: { feed: Feed }) {
  const version = feed.version.value;
  const index = useSignal<number | null>(null);
  const { series } = feed;
  const names = useMemo(() => metricNames(series), [version]);
  const drawn = ["loss", mainMetric(series.evaluations, feed.job.value?.spec.run && !series.evaluations.length ? null : feed.job.value)]; // in the loss chart
  const fresh = names.filter((name) => !drawn.includes(name));
  const wanted = route.value.query.get("metric");
  const name = names.find((each) => each === wanted) ?? fresh.find((each) => each !== "grad_norm" && !/^lr(_\d+)?$/.test(each)) ?? fresh[0] ?? "";
  const arrays = useMemo(() => metricData(series, name), [version, name]);
  const data = useMemo(() => [arrays.x, arrays.training, arrays.evaluation] as uPlot.AlignedData, [arrays]);
  if (fresh.length === 0 && !series.buckets.some((bucket) => drawn.some((each) => each && bucket.told?.[each] !== undefined))) return null;
  const trained = arrays.training.some((value) => value !== null);
  const evaluated = arrays.evaluation.some((value) => value !== null);
  const at = index.value !== null && index.value < arrays.x.length ? index.value : lastKnown(trained ? arrays.training : arrays.evaluation);
  const bound = metricBound(feed.job.value?.spec.strategy);
  const last = before(trained ? arrays.training : arrays.evaluation, arrays.x.length - 1);
  return (
    <Card title="Metrics" id="metrics" class="wide" note={<Loading feed={feed} />} tools={
      <label class="choice"><span>Metric</span>
        <select aria-label="Metric" value={name} onChange={(event) => put({ metric: event.currentTarget.value })}>
          {names.map((each) => <option key={each} value={each}>{each}</option>)}
        </select>
      </label>
    }>
      <Readout items={[
        { name: "round", value: count(arrays.x[at] ?? null) },
        ...(trained ? [{ swatch: "smooth", name: "training", value: metric(name, before(arrays.training, at)) }] : []),
        ...(evaluated ? [{ swatch: "evaluation", name: "evaluation", value: metric(name, before(arrays.evaluation, at)) }] : []),
      ]} />
      <Chart height={200} data={data} variant={`metric/${name}`} onIndex={(i) => (index.value = i)}
        summary={`${name} by round; ${metric(name, last)} at the end.`} options={() => looks(feed.id, name)} />
      {name.startsWith("client_") && bound !== null && <p class="card-foot">Each client's value is limited to ±{bound} (<code>metric_bound</code>).</p>}
    </Card>
  );
}

function looks(key: string, name: string): Omit<uPlot.Options, "width" | "height"> {
  return {
    cursor: cursor(key),
    scales: { x: { time: false } },
    axes: [
      axis({ size: 30, values: (_u, ticks) => ticks.map((v) => (Number.isInteger(v) ? count(v) : "")) }),
      axis({ size: 56, values: (_u, ticks) => ticks.map((v) => metricTick(name, v)) }),
    ],
    series: [
      {},
      { scale: "y", stroke: color("--accent"), width: 1.8, spanGaps: true, points: { show: false } },
      { scale: "y", stroke: color("--evaluation"), width: 1.4, dash: [3, 3], spanGaps: true, points: { show: true, size: 7, width: 0, fill: color("--evaluation") } },
    ],
  };
}
