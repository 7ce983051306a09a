/* Without a session: how to get an address, and a field for what was printed. */
import { signal, useSignal } from "@preact/signals";
import { ApiError, login, loginByToken } from "../api";
import { Mark } from "../parts/icons";
import { pasted } from "../route";
import { session } from "../stream";

/** Why the code in the page's address did not work. */
export const codeProblem = signal("");

export function LoginPage() {
  const text = useSignal("");
  const busy = useSignal(false);
  const error = useSignal(codeProblem.peek());
  const submit = async (event: Event) => {
    event.preventDefault();
    const { code, token } = pasted(text.value);
    if (!code && !token) return;
    busy.value = true;
    error.value = "";
    try {
      await (token ? loginByToken(token) : login(code ?? ""));
      session.value = true;
    } catch (reason) {
      error.value = explain(reason);
    } finally {
      busy.value = false;
    }
  };
  return (
    <main class="login">
      <div class="login-card">
        <Mark size={44} />
        <h1>Sign in to rayps</h1>
        <p class="lead">The service prints an address that signs this browser in. Open it, or paste it here.</p>
        <form onSubmit={submit}>
          <label for="code">Address, code or token</label>
          <div class="login-row">
            <input id="code" type="text" autocomplete="off" spellcheck={false} autofocus value={text.value} placeholder="http://127.0.0.1:8420/#code=…"
              aria-invalid={error.value !== ""} aria-describedby="login-error" onInput={(event) => (text.value = event.currentTarget.value)} />
            <button type="submit" class="button button-primary" disabled={busy.value || !text.value.trim()}>{busy.value ? "Signing in" : "Sign in"}</button>
          </div>
          <p id="login-error" class="form-error" role="alert">{error.value}</p>
        </form>
        <div class="login-help">
          <p>Where the address comes from:</p>
          <dl>
            <div><dt><code>rayps serve</code></dt><dd>prints one when the service starts.</dd></div>
            <div><dt><code>rayps open</code></dt><dd>prints a new one. An address works once, within five minutes.</dd></div>
          </dl>
        </div>
      </div>
    </main>
  );
}

/** A refusal of a code in words that say what to do. */
export function explain(reason: unknown): string {
  if (reason instanceof ApiError) {
    if (reason.status === 0) return "The service cannot be reached. Is it still running?";
    if (reason.status === 401 || reason.status === 403) return "That code was used before or is too old. Run rayps open for a new address.";
    return reason.message;
  }
  return String(reason);
}
