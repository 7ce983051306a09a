/* Where the time of a job's workers and servers went, and what costs most of it. */
import type { Feed } from "../feed";
import { PARTS, strips, used, type Strip } from "../lib/account";
import { duration, percent } from "../lib/format";
import { Card, Empty } from "./bits";

export function TimeCard({ feed }: { feed: Feed }) {
  void feed.version.value;
  const account = feed.job.value?.progress?.account;
  const found = strips(account);
  const goodput = account?.goodput ?? null;
  return (
    <Card title="Time" id="time" note={goodput === null ? undefined : `${percent(goodput)} useful`} tools={found.length > 0 && <Legend found={found} />}>
      {found.length === 0 && <Empty title="No report yet">It appears with the first rounds.</Empty>}
      {account?.verdict && found.length > 0 && <p class={`time-verdict${account.guilty?.length ? " is-guilty" : ""}`}>{sentence(account.verdict)}</p>}
      <ul class="time-strips">
        {found.map((strip) => (
          <li key={strip.name} class={strip.guilty ? "is-guilty" : ""}>
            <span class="time-name">{strip.name}</span>
            <span class="time-strip" role="img" aria-label={said(strip)}>
              {strip.parts.map((each) => (
                <i key={each.part} class={`time-${each.part}`} style={{ width: `${each.share * 100}%` }} title={`${each.part}: ${percent(each.share)}, ${duration(each.seconds)}`} />
              ))}
            </span>
            <span class="time-total">{duration(strip.seconds)}</span>
          </li>
        ))}
      </ul>
    </Card>
  );
}

function Legend({ found }: { found: readonly Strip[] }) {
  return (
    <ul class="gantt-legend" aria-label="Colours">
      {used(found).map((part) => <li key={part} title={PARTS[part]}><i class={`gantt-key time-${part}`} />{part}</li>)}
    </ul>
  );
}

function said(strip: Strip): string {
  return `${strip.name}: ${strip.parts.map((each) => `${each.part} ${percent(each.share, 0)}`).join(", ")}`;
}

function sentence(text: string): string {
  return `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;
}
