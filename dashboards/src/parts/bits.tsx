/* Small pieces that several pages use. */
import { useSignal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { now } from "../clock";
import { ago, stamp } from "../lib/format";
import { TONES, WORDS } from "../lib/status";
import type { Status } from "../types";
import { CheckIcon, CopyIcon, StatusIcon } from "./icons";

export function Badge({ status, large = false }: { status: Status; large?: boolean }) {
  return (
    <span class={`badge tone-${TONES[status] ?? "warn"}${large ? " badge-large" : ""}`} data-status={status}>
      <StatusIcon status={status} />
      {WORDS[status] ?? status}
    </span>
  );
}

/** A bar from 0 to 1; null = moving, but how far is not known. */
export function Bar({ share, tone, label }: { share: number | null; tone: string; label: string }) {
  const value = share === null ? undefined : Math.round(share * 100);
  return (
    <div class={`bar tone-${tone}${share === null ? " bar-open" : ""}`} role="progressbar" aria-label={label}
      aria-valuemin={0} aria-valuemax={100} aria-valuenow={value}>
      <div class="bar-fill" style={{ width: share === null ? "30%" : `${(share * 100).toFixed(2)}%` }} />
    </div>
  );
}

/** A button that copies text and says so. */
export function Copy({ text, children, title, small = false }: { text: () => string; children?: ComponentChildren; title: string; small?: boolean }) {
  const done = useSignal(false);
  const copy = async () => {
    await toClipboard(text());
    done.value = true;
    window.setTimeout(() => (done.value = false), 1600);
  };
  return (
    <button type="button" class={small ? "button-icon" : "button"} onClick={copy} title={title} aria-label={small ? title : undefined}>
      {done.value ? <CheckIcon /> : <CopyIcon />}
      {children && <span>{done.value ? "Copied" : children}</span>}
      <span class="sr" role="status">{done.value ? "Copied" : ""}</span>
    </button>
  );
}

/** Clipboard access needs a safe origin; a plain-HTTP address on another host gets the older way. */
async function toClipboard(text: string): Promise<void> {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

/** Text in a box with a copy button, for commands. */
export function Command({ text, label }: { text: string; label: string }) {
  return (
    <div class="command">
      <div class="command-head">
        <span>{label}</span>
        <Copy text={() => text} title={`Copy: ${label}`} small />
      </div>
      <pre tabIndex={0}><code>{text}</code></pre>
    </div>
  );
}

/** How long ago something was, kept current, with the full time as its title. */
export function Ago({ at }: { at: number | null }) {
  if (at === null) return <>–</>;
  return <time dateTime={new Date(at * 1000).toISOString()} title={stamp(at)}>{ago(Math.max(0, now.value - at))}</time>;
}

/** A modal question or note; the browser's own dialog keeps the focus inside and closes on Escape. */
export function Dialog({ title, open, onClose, children }: { title: string; open: boolean; onClose: () => void; children: ComponentChildren }) {
  const box = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    const dialog = box.current;
    if (open && dialog && !dialog.open) dialog.showModal();
    if (!open && dialog?.open) dialog.close();
  }, [open]);
  return (
    <dialog ref={box} onClose={onClose} aria-label={title} onClick={(event) => event.target === box.current && onClose()}>
      <div class="dialog-body">
        <h2>{title}</h2>
        {open && children}
      </div>
    </dialog>
  );
}

/** A card of the job page. */
export function Card({ title, note, tools, children, class: extra = "", id }: {
  title: string; note?: ComponentChildren; tools?: ComponentChildren; children: ComponentChildren; class?: string; id?: string;
}) {
  const heading = `h-${id ?? title.toLowerCase().replaceAll(" ", "-")}`;
  return (
    <section class={`card ${extra}`} aria-labelledby={heading} id={id}>
      <header class="card-head">
        <h2 id={heading}>{title}</h2>
        {note && <span class="card-note">{note}</span>}
        {tools && <div class="card-tools">{tools}</div>}
      </header>
      {children}
    </section>
  );
}

/** A calm message in the middle of an empty place. */
export function Empty({ title, children }: { title: string; children?: ComponentChildren }) {
  return (
    <div class="empty">
      <p class="empty-title">{title}</p>
      {children && <div class="empty-text">{children}</div>}
    </div>
  );
}

/** One figure of a page's head. */
export function Tile({ name, value, unit, note, tone = "" }: { name: string; value: string; unit?: string; note: string; tone?: string }) {
  return (
    <div class={`tile ${tone && `tone-${tone}`}`}>
      <dt>{name}</dt>
      <dd><span class="tile-value">{value}</span>{unit && value !== "–" && <span class="tile-unit">{unit}</span>}<span class="tile-note">{note}</span></dd>
    </div>
  );
}
