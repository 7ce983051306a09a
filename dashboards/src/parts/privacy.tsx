/* What a private job has spent, what that protects, against whom, and what it assumes. */
import { useMemo } from "preact/hooks";
import type { Feed } from "../feed";
import { plural } from "../lib/format";
import { claimOf, shown, spentShare } from "../lib/privacy";
import { Bar, Card, Empty } from "./bits";

export function PrivacyCard({ feed }: { feed: Feed }) {
  const version = feed.version.value;
  const claim = useMemo(() => claimOf(feed.events, feed.series), [version]);
  if (!claim) return <Card title="Privacy" id="privacy"><Empty title="The first round says what is claimed" /></Card>;
  const share = spentShare(claim);
  return (
    <Card title="Privacy" id="privacy" note={plural(claim.releases, "release")}>
      <div class="privacy">
        <p class="privacy-epsilon">
          <strong>ε = {shown(claim.epsilon)}</strong>{claim.budget !== null && <> of {shown(claim.budget)}</>}
          <span class="faint"> at δ = {shown(claim.delta)}, for each {claim.unit}; noise {shown(claim.noise)} × clip</span>
        </p>
        {share !== null && <Bar share={share} tone={share > 0.95 ? "warn" : "run"} label="Privacy budget spent" />}
        {!claim.proves && <p class="tone-warn privacy-warning" role="status">This run proves nothing: {claim.notProven}</p>}
      </div>
      <dl class="facts">
        <div><dt>Hides whether</dt><dd>{claim.neighbours}</dd></div>
        <div><dt>Holds against</dt><dd><ul>{claim.holdsAgainst.map((each) => <li key={each}>{each}</li>)}</ul></dd></div>
        <div><dt>Trusted</dt><dd>{claim.trusted}</dd></div>
        <div><dt>Assumes</dt><dd><ul>{claim.assumes.map((each) => <li key={each}>{each}</li>)}</ul></dd></div>
      </dl>
    </Card>
  );
}
