/* The clients of a federated job: what data each holds, and in which rounds it took part. */
import { useEffect, useMemo, useRef } from "preact/hooks";
import { color, painted } from "../clock";
import type { Feed } from "../feed";
import { presence, skew, type ClientMap, type Fate } from "../lib/federated";
import { count, percent, plural } from "../lib/format";
import { Card } from "./bits";

const MOST_COLUMNS = 120; // rounds in a strip: the newest
const TINTS: Record<Fate, string> = { counted: "--client-counted", dropped: "--client-dropped", rejected: "--client-rejected" };

export function ClientsCard({ feed }: { feed: Feed }) {
  const version = feed.version.value;
  const { map, rounds } = feed.cohorts;
  const seen = useMemo(() => presence(rounds.values()), [version]);
  const columns = useMemo(() => [...rounds.keys()].sort((a, b) => a - b).slice(-MOST_COLUMNS), [version]);
  if (!map) return null;
  const more = map.count > map.names.length;
  const labelled = map.counts.length > 0 && map.labels.length > 0;
  const largest = Math.max(1, ...map.sizes);
  const most = Math.max(1, ...map.counts.flat());
  return (
    <Card title="Clients" id="clients" note={`${plural(map.count, "client")}, ${map.rows ? `${count(map.rows)} rows` : "numbers of rows secret"}${more ? `; ${map.names.length} of all sizes are shown` : ""}`}
      tools={<Key labelled={labelled} took={columns.length > 0} />}>
      <p class="card-foot">{facts(map)}</p>
      <div class="client-rows" tabIndex={0} role="region" aria-label="Each client's rows, and the rounds in which it took part">
        <table class="plain clients">
          <thead><tr>
            <th>Client</th><th class="num">Rows</th>
            {labelled && <th class="col-labels"><Labels map={map} /></th>}
            {columns.length > 0 && <th class="col-rounds">Rounds {count(columns[0])} to {count(columns[columns.length - 1])}</th>}
            {columns.length > 0 && <th class="num" title="Rounds in which its update counted, of those in which it was asked">Counted</th>}
          </tr></thead>
          <tbody>
            {map.names.map((name, k) => (
              <tr key={name}>
                <td class="client-name">{name}</td>
                <td class="num">{map.sizes[k] ? <Size rows={map.sizes[k]!} largest={largest} /> : "secret"}</td>
                {labelled && <td><Held labels={map.labels} counts={map.counts[k] ?? []} most={most} /></td>}
                {columns.length > 0 && <td><Strip own={seen.get(name)} columns={columns} name={name} version={version} /></td>}
                {columns.length > 0 && <td class="num">{share(seen.get(name))}</td>}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Card>
  );
}

function facts(map: ClientMap): string {
  if (map.rows === 0) return "The clients' numbers of rows are secret.";
  const own = skew(map);
  const sizes = map.smallest === map.largest ? `${count(map.largest)} rows each` : `${count(map.smallest)} to ${count(map.largest)} rows each, the median ${count(map.median)}`;
  return own === null ? `${sizes}.` : `${sizes}; a client's most frequent label has ${percent(own, 0)} of its rows on average, among ${plural(map.labels.length, "label")}.`;
}

function Size({ rows, largest }: { rows: number; largest: number }) {
  return <span class="client-size"><span aria-hidden="true" style={{ width: `${(100 * rows) / largest}%` }} /><b>{count(rows)}</b></span>;
}

function Labels({ map }: { map: ClientMap }) {
  const every = Math.ceil(map.labels.length / 20);
  return <span class="label-names" aria-label={`Labels: ${map.labels.join(", ")}`}>{map.labels.map((label, i) => <span key={label} title={`label ${label}`} aria-hidden="true">{i % every ? "" : label}</span>)}</span>;
}

/** The rows of each label as cells: the stronger, the more. */
function Held({ labels, counts, most }: { labels: string[]; counts: number[]; most: number }) {
  const words = labels.map((label, i) => ({ label, n: counts[i] ?? 0 })).filter((each) => each.n > 0).map((each) => `${each.label}: ${count(each.n)}`).join(", ") || "no rows";
  return (
    <svg class="client-labels" viewBox={`0 0 ${labels.length} 1`} preserveAspectRatio="none" role="img" aria-label={`By label, ${words}`}>
      {labels.map((label, i) => {
        const n = counts[i] ?? 0;
        return (
          <g key={label}>
            <rect class="label-none" x={i + 0.04} y={0.06} width={0.92} height={0.88} />
            <rect class="label-some" x={i + 0.04} y={0.06} width={0.92} height={0.88} fill-opacity={n ? (0.18 + 0.82 * Math.sqrt(n / most)).toFixed(3) : 0}><title>{`label ${label}: ${plural(n, "row")}`}</title></rect>
          </g>
        );
      })}
    </svg>
  );
}

/** A client's rounds as a strip: counted, dropped, rejected, or not asked. */
function Strip({ own, columns, name, version }: { own: Map<number, Fate> | undefined; columns: number[]; name: string; version: number }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const paint = painted.value;
  useEffect(() => {
    const element = canvas.current;
    const ctx = element?.getContext("2d");
    if (!element || !ctx) return;
    const ratio = devicePixelRatio || 1;
    element.width = element.clientWidth * ratio;
    element.height = element.clientHeight * ratio;
    const tints = { counted: color(TINTS.counted), dropped: color(TINTS.dropped), rejected: color(TINTS.rejected), none: color("--heat-none") };
    const step = element.width / Math.max(columns.length, 24);
    columns.forEach((round, i) => {
      ctx.fillStyle = tints[own?.get(round) ?? "none"];
      const left = Math.round(i * step);
      ctx.fillRect(left, 0, Math.max(1, Math.round((i + 1) * step) - left - (step > 4 * ratio ? ratio : 0)), element.height);
    });
  }, [version, paint, columns]);
  const words = `${name}: ${said(own)}`;
  return <canvas ref={canvas} class="heat client-strip" role="img" aria-label={words} title={words} />;
}

function tally(own: Map<number, Fate> | undefined): Record<Fate, number> {
  const found: Record<Fate, number> = { counted: 0, dropped: 0, rejected: 0 };
  for (const fate of own?.values() ?? []) found[fate] += 1;
  return found;
}

function said(own: Map<number, Fate> | undefined): string {
  const { counted, dropped, rejected } = tally(own);
  return own ? `counted in ${plural(counted, "round")}, dropped in ${dropped}, rejected in ${rejected}` : "not asked yet";
}

function share(own: Map<number, Fate> | undefined): string {
  const { counted } = tally(own);
  return own ? `${count(counted)} of ${count(own.size)}` : "–";
}

function Key({ labelled, took }: { labelled: boolean; took: boolean }) {
  return (
    <span class="key" aria-hidden="true">
      {labelled && <span><i class="label-key" />rows of a label</span>}
      {took && <><span><i class="key-counted" />counted</span><span><i class="key-rejected" />rejected</span><span><i class="key-dropped" />dropped</span></>}
    </span>
  );
}
