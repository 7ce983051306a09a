/* The reader's clock and theme, as signals. */
import { effect, signal } from "@preact/signals";

/** Unix seconds, once a second while the page is looked at. */
export const now = signal(Date.now() / 1000);

window.setInterval(() => {
  if (!document.hidden) now.value = Date.now() / 1000;
}, 1000);

export type Theme = "system" | "light" | "dark";

/** The chosen theme; "system" follows the operating system. */
export const theme = signal<Theme>(stored());
/** Grows when the colours change, for what is drawn on a canvas. */
export const painted = signal(0);

effect(() => {
  const chosen = theme.value;
  if (chosen === "system") delete document.documentElement.dataset["theme"];
  else document.documentElement.dataset["theme"] = chosen;
  try {
    if (chosen === "system") localStorage.removeItem("rayps.theme");
    else localStorage.setItem("rayps.theme", chosen);
  } catch {
    // Storage may be blocked: the choice then lasts as long as the page.
  }
  painted.value = painted.peek() + 1;
});

window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  painted.value += 1;
});

function stored(): Theme {
  try {
    const value = localStorage.getItem("rayps.theme");
    return value === "light" || value === "dark" ? value : "system";
  } catch {
    return "system";
  }
}

const probe = document.createElement("span");
probe.hidden = true;

/** A colour of the style sheet (`--accent`) as a canvas can use it. */
export function color(name: string): string {
  if (!probe.isConnected) document.body.append(probe);
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}
