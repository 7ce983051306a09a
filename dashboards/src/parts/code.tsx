/* The code of a job: its archive, the Git commit of the folder that was packed, and what differs from it. */
import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { address, code as load } from "../api";
import { bytes, plural } from "../lib/format";
import type { CodeOrigin } from "../types";
import { Card, Copy } from "./bits";
import { Fact } from "./facts";

export function CodeCard({ id, code }: { id: string; code: string }) {
  const origin = useSignal<CodeOrigin>({});
  useEffect(() => {
    load(id).then((found) => (origin.value = found.origin ?? {}), () => undefined); // the hash alone is shown then
  }, [id]);
  const { files, bytes: size, folder, commit, branch } = origin.value;
  return (
    <Card title="Code" id="code" tools={<Copy text={() => `rayps clone ${id}`} title="Copy the command that writes these files into a folder and submits the job again">Clone</Copy>}>
      <dl class="facts">
        <Fact name="SHA-256"><span class="path"><a href={address(`code/${code}`)} title="Download the files as a tar archive"><code>{code}</code></a><Copy text={() => code} title="Copy the SHA-256" small /></span></Fact>
        {files != null && <Fact name="Files">{plural(files, "file")}{size != null && `, ${bytes(size)}`}</Fact>}
        {folder && <Fact name="Packed from"><code>{folder}</code></Fact>}
        {commit && <Fact name="Commit"><code>{commit.slice(0, 12)}</code>{branch && ` on ${branch}`}, {changes(origin.value)}</Fact>}
      </dl>
      {origin.value.diff && <Diff text={origin.value.diff} cut={origin.value.diff_cut === true} />}
    </Card>
  );
}

/** What differs from the commit, in words. */
function changes({ dirty, untracked }: CodeOrigin): string {
  if (!dirty) return "nothing changed since";
  return untracked ? `changed since, with ${plural(untracked, "new file")}` : "changed since";
}

const TONES: Record<string, string> = { "+": "diff-new", "-": "diff-old", "@": "diff-place" };

function Diff({ text, cut }: { text: string; cut: boolean }) {
  const open = useSignal(false);
  return (
    <details class="as-table" onToggle={(event) => (open.value = event.currentTarget.open)}>
      <summary>What differs from the commit</summary>
      {open.value && <pre class="diff" tabIndex={0} aria-label="What differs from the commit">
        {text.replace(/\n$/, "").split("\n").map((line, i) => <span key={i} class={/^(\+\+\+|---)/.test(line) ? "diff-file" : TONES[line[0] ?? ""]}>{line}{"\n"}</span>)}
      </pre>}
      {cut && <p class="card-foot">The difference is longer; this is its beginning.</p>}
    </details>
  );
}
