/* A pipeline's schedule: when each stage works and waits, by its table and as a step went; and what a step costs. */
import type { Feed } from "../feed";
import { duration, percent, plural } from "../lib/format";
import { costRows, KINDS, newest, timeline, type CostRow, type Kind, type Pass, type Timeline } from "../lib/schedule";
import { Card, Empty } from "./bits";

const WIDE = 1000;
const LEFT = 62;
const RIGHT = 132;
const ROW = 26;
const BAR = 20;

export function ScheduleCard({ feed }: { feed: Feed }) {
  void feed.version.value;
  const event = newest(feed.events, "schedule");
  const theory = timeline(event?.["theory"]);
  const measured = timeline(event?.["measured"]);
  const shown = theory ?? measured;
  return (
    <Card title="Schedule" id="schedule" note={shown ? plural(shown.rows.length, "stage") : undefined} tools={shown && <Legend line={shown} />}>
      {!shown && <Empty title="No timeline yet">It appears after the third step.</Empty>}
      {theory && <Chart line={theory} title="By the schedule" note={`${percent(theory.idle)} idle, equal stages, backward ${theory.rows.some((row) => row.some((each) => each.kind === "W")) ? "split in two" : "twice as long"}`} />}
      {measured && <Chart line={measured} title="Measured step" note={`${percent(measured.idle)} idle, ${took(measured.length)} in total`} inSeconds />}
    </Card>
  );
}

/** What a step cost in each phase that has ended, beside its formula. */
export function CostsCard({ feed }: { feed: Feed }) {
  void feed.version.value;
  const rows = costRows(newest(feed.events, "costs"));
  if (rows.length === 0) return null;
  const known = rows.some((row) => row.formula !== ""); // a robust rule's bytes have none
  return (
    <Card title="Cost of a step" id="costs" class="wide" note={known ? "measured, and by formula" : "as measured"}>
      <div class="scroll-x" tabIndex={0} aria-label="Cost of a step">
        <table class="plain">
          <thead><tr><th>All workers together</th><th class="num">Measured</th>{known && <th class="num">Formula</th>}</tr></thead>
          <tbody>{rows.map((row: CostRow) => <tr key={row.what}><td>{row.what}</td><td class="num">{row.measured}</td>{known && <td class="num">{row.formula}</td>}</tr>)}</tbody>
        </table>
      </div>
    </Card>
  );
}

function Chart({ line, title, note, inSeconds = false }: { line: Timeline; title: string; note: string; inSeconds?: boolean }) {
  const scale = (WIDE - LEFT - RIGHT) / line.length;
  const height = line.rows.length * ROW + 4;
  const said = line.idles.map((idle, stage) => `stage ${stage} is idle ${percent(idle)} and holds ${line.held[stage]}`).join("; ");
  return (
    <figure class="gantt">
      <figcaption><b>{title}</b> <span class="faint">{note}</span></figcaption>
      <div class="scroll-x" tabIndex={0} aria-label={`${title}, stage by stage`}>
        <svg viewBox={`0 0 ${WIDE} ${height}`} role="img" aria-label={`${title}: ${said}`}>
          {line.rows.map((row, stage) => (
            <g key={stage} transform={`translate(0 ${stage * ROW})`}>
              <text class="gantt-name" x={LEFT - 8} y={BAR / 2 + 4.5}>stage {stage}</text>
              <rect class="gantt-wait" x={LEFT} y={0} width={WIDE - LEFT - RIGHT} height={BAR} rx={3} />
              {row.map((each) => <Box key={`${each.chunk}${each.kind}${each.micro}`} pass={each} scale={scale} inSeconds={inSeconds} />)}
              <text class="gantt-said" x={WIDE - RIGHT + 10} y={BAR / 2 + 4.5}>waits {percent(line.idles[stage], 0)}, holds {line.held[stage]}</text>
            </g>
          ))}
        </svg>
      </div>
    </figure>
  );
}

function Box({ pass, scale, inSeconds }: { pass: Pass; scale: number; inSeconds: boolean }) {
  const x = LEFT + pass.start * scale;
  const width = Math.max((pass.end - pass.start) * scale, 0.5);
  const lasts = inSeconds ? took(pass.end - pass.start) : plural(pass.end - pass.start, "unit");
  return (
    <g class={`gantt-${pass.kind}${pass.turn % 2 ? " is-odd" : ""}`}>
      <rect x={x} y={0} width={width} height={BAR} rx={Math.min(3, width / 4)}>
        <title>{`${KINDS[pass.kind]}, micro-batch ${pass.micro}, chunk ${pass.chunk}: ${lasts}`}</title>
      </rect>
      {width >= 9 * String(pass.micro).length + 2 && <text x={x + width / 2} y={BAR / 2 + 4}>{pass.micro}</text>}
    </g>
  );
}

function Legend({ line }: { line: Timeline }) {
  const used = (Object.keys(KINDS) as Kind[]).filter((kind) => line.rows.some((row) => row.some((each) => each.kind === kind)));
  const chunks = line.rows.some((row) => row.some((each) => each.turn > 0));
  return (
    <ul class="gantt-legend" aria-label="Colours">
      {used.map((kind) => <li key={kind}><i class={`gantt-key gantt-key-${kind}`} />{KINDS[kind]}</li>)}
      {chunks && <li class="faint">pale: odd chunks</li>}
      <li><i class="gantt-key gantt-key-wait" />waits</li>
    </ul>
  );
}

function took(seconds: number): string {
  return seconds < 1 ? `${Number((1000 * seconds).toPrecision(3))} ms` : seconds < 60 ? `${Number(seconds.toPrecision(3))} s` : duration(seconds);
}
