/* The few drawings of the page, as inline SVG in the colour of the text around them. */
import type { ComponentChildren } from "preact";
import { GROUP_TONES } from "../lib/servers";
import type { Status } from "../types";

function Icon({ children, size = 16 }: { children: ComponentChildren; size?: number }) {
  return (
    <svg class="icon" width={size} height={size} viewBox="0 0 16 16" fill="none" stroke="currentColor" stroke-width="1.6"
      stroke-linecap="round" stroke-linejoin="round" aria-hidden="true" focusable="false">
      {children}
    </svg>
  );
}

/** The mark: a ring of workers and, in another colour, the one that serves. */
export function Mark({ size = 22 }: { size?: number }) {
  return (
    <svg class="mark" width={size} height={size} viewBox="0 0 32 32" aria-hidden="true" focusable="false">
      <circle class="mark-ring" cx="16" cy="16" r="10" fill="none" stroke-width="2.6" />
      <g class="mark-node">
        <circle cx="16" cy="6" r="4.4" />
        <circle cx="26" cy="16" r="4.4" />
        <circle cx="6" cy="16" r="4.4" />
      </g>
      <circle class="mark-serve" cx="16" cy="26" r="4.4" />
    </svg>
  );
}

/** A status by its shape, so that it is read without its colour. */
export function StatusIcon({ status }: { status: Status }) {
  switch (status) {
    case "SUCCEEDED": return <Icon size={14}><path d="M3 8.5l3.2 3.2L13 5" stroke-width="2" /></Icon>;
    case "FAILED": return <Icon size={14}><path d="M4 4l8 8M12 4l-8 8" stroke-width="2" /></Icon>;
    case "STOPPED": return <Icon size={14}><rect x="4" y="4" width="8" height="8" rx="1.5" /></Icon>;
    case "STOPPING": return <Icon size={14}><rect x="4" y="4" width="8" height="8" rx="1.5" fill="currentColor" /></Icon>;
    case "QUEUED": return <Icon size={14}><circle cx="8" cy="8" r="5.5" /><path d="M8 5v3l2 1.4" /></Icon>;
    case "RECOVERING": return <Icon size={14}><path d="M13 8a5 5 0 1 1-1.6-3.7M13 2.5v2.6h-2.6" /></Icon>;
    case "UNKNOWN": return <Icon size={14}><path d="M5.8 5.8a2.3 2.3 0 1 1 3.3 2.1c-.8.4-1.1.8-1.1 1.6M8 12.4v.1" /></Icon>;
    case "STARTING": return <Icon size={14}><circle cx="8" cy="8" r="5" stroke-dasharray="3 3" /></Icon>;
    case "RUNNING": return <Icon size={14}><path d="M5.5 3.8v8.4L12 8z" fill="currentColor" /></Icon>;
  }
}

const GROUP_SHAPES: Record<string, Status> = {
  ready: "SUCCEEDED", healing: "RECOVERING", resizing: "RUNNING", degraded: "FAILED", starting: "STARTING", stopping: "STOPPING",
  stopped: "STOPPED", unreachable: "UNKNOWN",
};

/** How a server group stands, as a word, a shape and a colour. */
export function GroupBadge({ status, large = false }: { status: string; large?: boolean }) {
  return (
    <span class={`badge tone-${GROUP_TONES[status] ?? "idle"}${large ? " badge-large" : ""}`} data-status={status}>
      <StatusIcon status={GROUP_SHAPES[status] ?? "UNKNOWN"} />
      {status.charAt(0).toUpperCase() + status.slice(1)}
    </span>
  );
}

export const CopyIcon = () => <Icon><rect x="5.5" y="5.5" width="8" height="8" rx="1.5" /><path d="M10.5 3.5v-.2a1 1 0 0 0-1-1H3.3a1 1 0 0 0-1 1v6.2a1 1 0 0 0 1 1h.2" /></Icon>;
export const CheckIcon = () => <Icon><path d="M3 8.5l3.2 3.2L13 5" stroke-width="2" /></Icon>;
export const DownIcon = () => <Icon><path d="M8 2.5v8M4.8 7.6L8 10.8l3.2-3.2M3 13.5h10" /></Icon>;
export const StopIcon = () => <Icon><rect x="4" y="4" width="8" height="8" rx="1.5" fill="currentColor" /></Icon>;
export const SearchIcon = () => <Icon><circle cx="7" cy="7" r="4.2" /><path d="M10.2 10.2L13.5 13.5" /></Icon>;
export const SunIcon = () => <Icon><circle cx="8" cy="8" r="2.8" /><path d="M8 1.6v1.2M8 13.2v1.2M1.6 8h1.2M13.2 8h1.2M3.5 3.5l.8.8M11.7 11.7l.8.8M3.5 12.5l.8-.8M11.7 4.3l.8-.8" /></Icon>;
export const MoonIcon = () => <Icon><path d="M13 9.6A5.6 5.6 0 0 1 6.4 3a5.6 5.6 0 1 0 6.6 6.6z" /></Icon>;
export const SystemIcon = () => <Icon><rect x="2" y="3" width="12" height="8" rx="1.4" /><path d="M6 13.5h4" /></Icon>;
export const WarnIcon = () => <Icon><path d="M8 2.4l6 10.6H2zM8 6.6v3M8 11.4v.1" /></Icon>;
export const PlugIcon = () => <Icon><path d="M5.5 2v3M10.5 2v3M4 5h8v2.5a4 4 0 0 1-8 0zM8 11.5V14" /></Icon>;
