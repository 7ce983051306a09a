/* A federated job: its rounds of clients, what was learnt from them, and what data they hold. */
import { useSignal } from "@preact/signals";
import { useMemo } from "preact/hooks";
import uPlot from "uplot";
import { color } from "../clock";
import type { Feed } from "../feed";
import { count, duration, metric, plural, short } from "../lib/format";
import { bestOf, learnt, reasons, tallies, type Cohort, type Out, type Tally } from "../lib/federated";
import { mainMetric, sampled } from "../lib/plot";
import { attack, hasRealClients } from "../lib/strategy";
import { Card, Empty } from "./bits";
import { axis, Chart, cursor } from "./chart";
import { before, lastKnown, metricTick, pctRange, Readout, ROUND_STEPS, tick } from "./curves";

/** Who was asked in each round, whose update counted, and who was dropped or rejected and why. */
export function CohortsCard({ feed }: { feed: Feed }) {
  const version = feed.version.value;
  const index = useSignal<number | null>(null);
  const rounds = useMemo(() => tallies(feed.series.buckets, feed.cohorts), [version]);
  const data = useMemo(() => stacked(rounds), [rounds]);
  const at = index.value !== null && index.value < rounds.length ? index.value : rounds.length - 1;
  const now = rounds[at];
  return (
    <Card title="Clients by round" id="cohorts" note={rounds.length ? plural(rounds.length, "round") : undefined}>
      {!now ? <Empty title="No rounds yet">Each round shows which clients were asked, and whether their updates counted.</Empty> : <>
        <Readout items={[
          { name: "round", value: count(now.round) },
          { name: "sampled", value: count(now.sampled) },
          { swatch: "counted", name: "counted", value: count(now.counted) },
          { swatch: "rejected", name: "rejected", value: count(now.rejected) },
          { swatch: "dropped", name: "dropped", value: count(now.dropped) },
          ...(now.seconds !== null ? [{ name: clock(feed), value: virtual(now.seconds) }] : []),
        ]} />
        <Chart height={170} data={data} variant="cohorts" summary={cohortSummary(rounds)} onIndex={(i) => (index.value = i)}
          options={() => cohortOptions(feed.id)} />
        <Who cohort={feed.cohorts.rounds.get(now.round)} tally={now} kinds={1 + Number(rounds.some((each) => each.rejected > 0)) + Number(rounds.some((each) => each.dropped > 0))} />
        <Why feed={feed} />
        <Attacked feed={feed} />
        <RoundTable rounds={rounds} time={clock(feed)} />
      </>}
    </Card>
  );
}

/** The clients of one round by name, the one under the cursor or the newest; as high as a usual round needs, so that the page stands still. */
function Who({ cohort, tally, kinds }: { cohort: Cohort | undefined; tally: Tally; kinds: number }) {
  if (!cohort) return <div class="who"><p class="faint">The names of round {count(tally.round)} are no longer held here; its events have them.</p></div>;
  return (
    <div class="who" style={{ minHeight: `${18 + 26 * kinds}px` }} tabIndex={0} aria-label={`Clients of round ${cohort.round}`}>
      {cohort.skipped && <p class="who-skipped">The model is as it was: {cohort.message}.</p>}
      <dl>
        <div><dt><span class="swatch swatch-counted" />counted</dt><dd>{cohort.trained.length ? cohort.trained.map((name) => <span key={name} class="client">{name}</span>) : <span class="faint">none</span>}<More all={tally.counted} named={cohort.trained.length} /></dd></div>
        {tally.rejected > 0 && <Outs word="rejected" outs={cohort.rejected} all={tally.rejected} />}
        {tally.dropped > 0 && <Outs word="dropped" outs={cohort.dropped} all={tally.dropped} />}
      </dl>
    </div>
  );
}

function Outs({ word, outs, all }: { word: "rejected" | "dropped"; outs: Out[]; all: number }) {
  return (
    <div>
      <dt><span class={`swatch swatch-${word}`} />{word}</dt>
      <dd>{outs.map((out) => <span key={out.name} class={`client client-${word}`}>{out.name}{out.why && <>{" "}<span class="client-why">{out.why}</span></>}</span>)}<More all={all} named={outs.length} /></dd>
    </div>
  );
}

function More({ all, named }: { all: number; named: number }) {
  return all > named ? <span class="faint">and {count(all - named)} more</span> : null;
}

/** Attackers are drawn from the job's seed; no event names them. */
function Attacked({ feed }: { feed: Feed }) {
  const found = attack(feed.job.value?.spec.strategy);
  return found ? <p class="card-foot">Simulated attack: <code>{found}</code>. The attackers are drawn from the seed; they are not marked below.</p> : null;
}

/** The reasons of the whole run, so that nobody has to look through its rounds. */
function Why({ feed }: { feed: Feed }) {
  const found = useMemo(() => reasons(feed.cohorts.rounds.values()), [feed.version.value]);
  if (found.length === 0) return null;
  return (
    <p class="card-foot">Over the run, by name and round: {found.slice(0, 6).map((each, i) => <span key={each.fate + each.why}>{i > 0 && "; "}<b>{count(each.count)}</b> {each.why.startsWith(each.fate) ? each.why : `${each.fate}${each.why && `: ${each.why}`}`}</span>)}.</p>
  );
}

function RoundTable({ rounds, time }: { rounds: Tally[]; time: string }) {
  const open = useSignal(false);
  return (
    <details class="as-table" onToggle={(event) => (open.value = event.currentTarget.open)}>
      <summary>As a table</summary>
      {open.value && (
        <div class="scroll-x">
          <table class="plain">
            <thead><tr>{["Round", "Sampled", "Counted", "Rejected", "Dropped", upper(time)].map((name) => <th key={name} class="num">{name}</th>)}</tr></thead>
            <tbody>{sampled(rounds, 20).map((each) => (
              <tr key={each.round}>{[each.round, each.sampled, each.counted, each.rejected, each.dropped].map((n, i) => <td key={i} class="num">{count(n)}</td>)}<td class="num">{virtual(each.seconds)}</td></tr>
            ))}</tbody>
          </table>
        </div>
      )}
    </details>
  );
}

/** Bars that are drawn over one another from the tallest: sampled, of them replied, of them counted. */
function stacked(rounds: Tally[]): uPlot.AlignedData {
  return [
    rounds.map((each) => each.round), rounds.map((each) => each.counted + each.rejected + each.dropped),
    rounds.map((each) => each.counted + each.rejected), rounds.map((each) => each.counted),
  ];
}

function cohortOptions(key: string): Omit<uPlot.Options, "width" | "height"> {
  const bar = (fill: string): uPlot.Series => ({
    scale: "y", fill: color(fill), width: 0, points: { show: false }, paths: uPlot.paths.bars!({ size: [0.82, 44], gap: 0 }),
  });
  return {
    cursor: { ...cursor(key), points: { show: false } },
    scales: { x: { time: false, range: (_u, lo, hi) => [lo - 0.6, hi + 0.6] }, y: { range: (_u, _lo, hi) => [0, hi > 0 ? hi * 1.06 : 1] } },
    axes: [
      axis({ size: 30, values: whole }),
      axis({ size: 46, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000], values: (_u, ticks) => ticks.map((v) => count(v)) }),
    ],
    series: [{}, bar("--client-dropped"), bar("--client-rejected"), bar("--client-counted")],
  };
}

function cohortSummary(rounds: Tally[]): string {
  const sum = (key: "sampled" | "counted" | "dropped" | "rejected") => count(rounds.reduce((all, each) => all + each[key], 0));
  return `Clients by round over ${plural(rounds.length, "round")}: ${sum("sampled")} sampled, ${sum("counted")} counted, ${sum("rejected")} rejected, ${sum("dropped")} dropped.`;
}

/** What was learnt, by round or by time: the global model, and the clients' own where they have one. */
export function LearntCard({ feed }: { feed: Feed }) {
  const version = feed.version.value;
  const wanted = useSignal(false);
  const index = useSignal<number | null>(null);
  const { evaluations, buckets } = feed.series;
  const name = mainMetric(evaluations, null);
  const rounds = useMemo(() => tallies(buckets, feed.cohorts), [version]);
  const timed = rounds.some((each) => (each.seconds ?? 0) > 0);
  const byTime = wanted.value && timed;
  const found = useMemo(() => learnt(evaluations, name ?? "loss", rounds, byTime), [version, name, byTime]);
  const data = useMemo(() => [found.x, found.global, found.personal] as uPlot.AlignedData, [found]);
  if (!name) return null;
  const own = found.personal.some((value) => value !== null);
  const at = index.value !== null && index.value < found.x.length ? index.value : lastKnown(found.global);
  const lowest = feed.job.value?.lowest?.[name] ?? null; // null: it is not known which value is the best
  const best = lowest === null ? null : bestOf(found.global, lowest);
  const title = upper(name);
  return (
    <Card title={own ? `${title}, global and personal` : title} id="learnt" tools={timed && <>
      <button type="button" class="button toggle" aria-pressed={!byTime} onClick={() => (wanted.value = false)}>By round</button>
      <button type="button" class="button toggle" aria-pressed={byTime} onClick={() => (wanted.value = true)}>By {clock(feed)}</button>
    </>}>
      <Readout items={[
        byTime ? { name: clock(feed), value: virtual(found.x[at] ?? null) } : { name: "round", value: count(found.x[at] ?? null) },
        { swatch: "evaluation", name: own ? "global" : name, value: metric(name, before(found.global, at)) },
        ...(own ? [{ swatch: "personal", name: "personal", value: metric(name, before(found.personal, at)) }] : []),
        ...(best === null ? [] : [{ name: "best so far", value: metric(name, best) }]),
      ]} />
      <Chart height={220} data={data} variant={`${byTime}/${name}/${own}/${found.x.length > 120}`} onIndex={(i) => (index.value = i)}
        summary={learntSummary(found, name, own)} options={() => learntOptions(byTime ? `${feed.id}-virtual` : feed.id, name, found.x.length > 120, byTime)} />
    </Card>
  );
}

function learntOptions(key: string, name: string, many: boolean, byTime: boolean): Omit<uPlot.Options, "width" | "height"> {
  const line = (tint: string, extra: Partial<uPlot.Series> = {}): uPlot.Series =>
    ({ scale: "y", stroke: color(tint), width: 1.6, spanGaps: true, points: { show: !many, size: 6, width: 0, fill: color(tint) }, ...extra });
  return {
    cursor: cursor(key),
    scales: { x: { time: false }, y: { range: (_u, lo, hi) => pctRange(lo, hi) } },
    axes: [
      axis({ size: 30, values: byTime ? (_u, ticks) => ticks.map((v) => virtual(v)) : whole, ...(byTime ? { space: 80 } : {}) }),
      axis({ size: 52, incrs: ROUND_STEPS, values: (_u, ticks) => ticks.map((v) => metricTick(name, v)) }),
    ],
    series: [{}, line("--evaluation"), line("--personal", { dash: [6, 3] })],
  };
}

function learntSummary(found: { x: number[]; global: (number | null)[]; personal: (number | null)[] }, name: string, own: boolean): string {
  const last = (values: (number | null)[]) => metric(name, before(values, values.length - 1));
  return `${name} over ${plural(found.x.length, "evaluation")}: ${last(found.global)} at the end${own ? `; of the clients' own models ${last(found.personal)}` : ""}.`;
}

/** What a round took: on the virtual clock, or in real seconds where clients are real. */
export function VirtualCard({ feed }: { feed: Feed }) {
  const version = feed.version.value;
  const index = useSignal<number | null>(null);
  const rounds = useMemo(() => tallies(feed.series.buckets, feed.cohorts).filter((each) => each.seconds !== null), [version]);
  const data = useMemo(() => [rounds.map((each) => each.round), rounds.map((each) => each.seconds)] as uPlot.AlignedData, [rounds]);
  const all = rounds.reduce((sum, each) => sum + (each.seconds ?? 0), 0);
  if (!(all > 0)) return null;
  const time = clock(feed);
  const real = hasRealClients(feed.job.value?.spec.strategy);
  const now = rounds[index.value !== null && index.value < rounds.length ? index.value : rounds.length - 1]!;
  return (
    <Card title={upper(time)} id="virtual" note={`of a round${real ? "" : ", by the clients' own speeds"}`}>
      <Readout items={[{ name: "round", value: count(now.round) }, { swatch: "smooth", name: "took", value: virtual(now.seconds) }, { name: "in all", value: virtual(all) }]} />
      <Chart height={220} data={data} variant="virtual" summary={`${real ? "Seconds" : "Virtual seconds"} by round; ${virtual(all)} in total over ${plural(rounds.length, "round")}.`}
        onIndex={(i) => (index.value = i)} options={() => ({
          cursor: cursor(feed.id),
          scales: { x: { time: false }, y: { range: (_u, _lo, hi) => [0, hi > 0 ? hi * 1.08 : 1] } },
          axes: [axis({ size: 30, values: whole }), axis({ size: 52, values: (_u, ticks) => ticks.map((v) => `${tick(v)} s`) })],
          series: [{}, { scale: "y", stroke: color("--accent"), width: 1.6, points: { show: false } }],
        })} />
    </Card>
  );
}

/** What a round's seconds are called. */
function clock(feed: Feed): string {
  return hasRealClients(feed.job.value?.spec.strategy) ? "time" : "virtual time";
}

function upper(word: string): string {
  return word.charAt(0).toUpperCase() + word.slice(1);
}

/** Seconds of a round's clock: exact where they are few. */
function virtual(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined) return "–";
  return seconds < 100 ? `${short(seconds)} s` : duration(seconds);
}

function whole(_u: uPlot, ticks: number[]): string[] {
  return ticks.map((v) => (Number.isInteger(v) ? count(v) : ""));
}

