/* The start: use the login code of the address, ask whether there is a session, show the page. */
import { render } from "preact";
import { ApiError, cluster, login } from "./api";
import { App } from "./app";
import { backoff } from "./lib/cursor";
import { codeProblem, explain } from "./pages/login";
import { isCode, takeCode } from "./route";
import { link, session } from "./stream";
import "./styles.css";

async function start(): Promise<void> {
  const code = takeCode();
  if (code) codeProblem.value = await login(code).then(() => "", explain);
  for (let attempt = 0; session.value === null; attempt++) {
    try {
      await cluster();
      session.value = true;
    } catch (error) {
      const status = error instanceof ApiError ? error.status : 0;
      if (status === 401 || status === 403) session.value = false;
      else await pause(attempt);
    }
  }
  if (link.value.state === "lost") link.value = { state: "idle" };
}

/** Wait for a service that does not answer; the banner says so meanwhile. */
async function pause(attempt: number): Promise<void> {
  const wait = backoff(attempt);
  const since = link.value.state === "lost" ? link.value.since : Date.now();
  link.value = { state: "lost", retryAt: Date.now() + wait, since };
  await new Promise((resolve) => window.setTimeout(resolve, wait));
}

// A second address with a code, opened in a tab that is signed out.
window.addEventListener("hashchange", () => {
  if (!isCode(location.hash)) return;
  session.value = null;
  void start();
});

render(<App />, document.getElementById("app")!);
void start();
